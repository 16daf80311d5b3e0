"""Runs as their records show them: where one stands, what it needs, whether it is damaged, what it was made from."""
