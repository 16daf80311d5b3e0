"""Garbage collection: what may go of a store, and what must stay."""
