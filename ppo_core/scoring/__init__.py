"""Rewards: the user's functions, called and checked; and how two policies' scores compare."""
