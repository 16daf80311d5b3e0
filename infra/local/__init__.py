"""Artifacts and records in a folder of this machine, or in one that several machines share."""
