"""Engines as processes: started, watched, asked, timed out and ended, here or on a Ray cluster."""
