"""The outside world: storage, tracking, registry, processes and settings.

This folder knows bytes, paths and processes and no reinforcement learning; it imports nothing from the other folders.
"""
