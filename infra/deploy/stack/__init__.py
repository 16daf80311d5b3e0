"""The servers of a team on one machine: `python -m infra.deploy.stack up | down | status | env`, without containers."""
