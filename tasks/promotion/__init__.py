"""Which of two policies is better, and whose the alias is."""
