"""Prefect: the server that a flow talks to, deployments' parameters, automations and pages."""
