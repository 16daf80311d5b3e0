"""S3: the seam to it, and the store of artifacts and the records of runs on it."""
