"""The logins of Prefect and MLflow as files for their clients, so that no environment needs to hold them."""

from __future__ import annotations

from infra.deploy.stack.credentials import ADMIN, write_private
from infra.deploy.stack.site import PREFECT_PROFILE, Site


def write_logins(site: Site) -> None:
    """Both files; the passwords are hexadecimal, so neither form needs quoting."""
    api = {
        "PREFECT_API_URL": f"{site.prefect_url}/api",
        "PREFECT_API_AUTH_STRING": f"{ADMIN}:{site.credentials.prefect}",
    }
    profile = [f'{name} = "{value}"' for name, value in api.items()]
    lines = [f'active = "{PREFECT_PROFILE}"', f"[profiles.{PREFECT_PROFILE}]", *profile]
    write_private(site.prefect_profiles, "\n".join(lines) + "\n")
    login = {"mlflow_tracking_username": ADMIN, "mlflow_tracking_password": site.credentials.mlflow}
    lines = ["[mlflow]", *(f"{name} = {value}" for name, value in login.items())]
    write_private(site.mlflow_credentials, "\n".join(lines) + "\n")
