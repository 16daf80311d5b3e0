"""MLflow: curves, the model registry and its aliases; none of it can hold up a run."""
