"""Rewards of all kinds, the user's functions among them, called and checked; and how two policies' scores compare."""
