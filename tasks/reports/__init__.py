"""What MLflow and Prefect's pages show of a run: projections of its records, each point once."""
