"""The servers of a team on one machine: `python -m infra.stack up | down | status | env`, without containers."""
