"""What stages are made of: the decorator, the cache look-up, the run's context and the engines' jobs."""
