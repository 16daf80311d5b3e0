"""The records of runs and the leases on them: in a folder, or on S3."""
