"""Policies by name: where one is from, how good it is, which of two is better, and whose the alias is."""
