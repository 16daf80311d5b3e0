"""What MLflow, Prefect's pages and, at its end, the console show of a run: projections of its records."""
