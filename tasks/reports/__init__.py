"""What MLflow and Prefect's pages are told of a run: projections of its records, each point once."""
