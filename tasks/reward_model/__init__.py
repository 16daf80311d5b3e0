"""The tasks that make a reward model, and what they work with."""
