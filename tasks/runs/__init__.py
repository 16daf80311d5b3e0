"""Runs as their records tell them: where one stands, what it needs, whether it is damaged, where a policy is from."""
