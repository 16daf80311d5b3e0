"""Data: rows of users, tokens, tables and batches."""
