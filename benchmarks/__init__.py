"""Measurements that print a table and write JSON into `benchmarks/results/`; nothing here is a test."""
