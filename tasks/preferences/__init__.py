"""The tasks of the flows that learn from preferences, and what they work with."""
