"""What the servers know of each other: addresses, files, names. One value from which every service is made."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from infra.deploy.stack.credentials import ADMIN, Credentials
from infra.settings import Settings, StackSettings, direct_environment

LOOPBACK = "127.0.0.1"
DATABASE_USER = "ppoflow"
S3_PROFILE = "ppoflow"
PREFECT_PROFILE = "ppoflow"
S3_REGION = "us-east-1"
SERVERS = ("postgres", "ceph-mon", "ceph-osd", "s3", "prefect", "mlflow", "worker", "ray")
# Debian puts PostgreSQL's programs in no folder of PATH.
PROGRAM_FOLDERS = "/usr/lib/postgresql/*/bin"


@dataclass(frozen=True)
class Site:
    """The stack's settings, its passwords, and which servers it has."""

    settings: StackSettings
    credentials: Credentials
    servers: frozenset[str]

    @property
    def host(self) -> str:
        return str(self.settings.host)

    @property
    def secrets(self) -> Path:
        return self.settings.folder / "secrets"

    def folder(self, service: str) -> Path:
        """Where a service keeps its data."""
        return self.settings.folder / service

    def short_folder(self, name: str, characters: int) -> Path:
        """A folder for Unix sockets, whose paths may be 107 characters long: ours, or one of /tmp where that is not
        possible. Its sockets add up to `characters`."""
        wanted = self.settings.folder / name
        if len(str(wanted)) + characters < 108:
            return wanted
        return Path("/tmp") / f"ppoflow-{name.replace('/', '-')}-{self.credentials.stack[:8]}"

    @property
    def login(self) -> str | None:
        """What Prefect's server asks for."""
        return f"{ADMIN}:{self.credentials.prefect}" if self.settings.authentication else None

    @property
    def prefect_url(self) -> str:
        return f"http://{self.host}:{self.settings.prefect_port}"

    @property
    def mlflow_url(self) -> str:
        return f"http://{self.host}:{self.settings.mlflow_port}"

    @property
    def ray_address(self) -> str:
        return f"{self.host}:{self.settings.ray_port}"

    @property
    def s3_endpoint(self) -> str | None:
        """The user's own, or ours; None where the stack has no S3."""
        ours = f"http://{self.host}:{self.settings.s3_port}" if "s3" in self.servers else None
        return self.settings.s3 or ours

    @property
    def s3_credentials(self) -> Path:
        """Ceph's keys, as a file for AWS's libraries."""
        return self.secrets / "aws-credentials"

    @property
    def ray_token(self) -> Path:
        """What Ray asks its nodes and clients for."""
        return self.secrets / "ray-token"

    @property
    def prefect_profiles(self) -> Path:
        """Prefect's login, as profiles for its clients."""
        return self.secrets / "prefect-profiles.toml"

    @property
    def mlflow_credentials(self) -> Path:
        """MLflow's login, for its clients; see infra/mlflow/login.py."""
        return self.secrets / "mlflow-credentials"

    @property
    def password_file(self) -> Path:
        """PostgreSQL's password, as a file for its client libraries: no address has a password in it."""
        return self.secrets / "pgpass"

    @property
    def database_server(self) -> str | None:
        """The address of PostgreSQL; None where the stack has none."""
        ours = f"postgresql://{DATABASE_USER}@{LOOPBACK}:{self.settings.postgres_port}"
        return self.settings.postgres or (ours if "postgres" in self.servers else None)

    def database(self, name: str, *, driver: str, sqlite: str = "sqlite") -> str:
        """The address of one database, for SQLAlchemy; of a file of ours where the stack has no PostgreSQL."""
        if self.database_server is None:
            return f"{sqlite}:///{self.folder(name)}/{name}.db"
        return self.database_server.replace("postgresql://", f"postgresql+{driver}://") + f"/{name}"

    def database_environment(self) -> dict[str, str]:
        return {} if self.settings.postgres else {"PGPASSFILE": str(self.password_file)}

    def s3_environment(self) -> dict[str, str]:
        """For AWS's libraries: where S3 is and, if it is ours, where its keys are."""
        if self.s3_endpoint is None:
            return {}
        where = {"AWS_ENDPOINT_URL_S3": self.s3_endpoint, "MLFLOW_S3_ENDPOINT_URL": self.s3_endpoint}
        if self.settings.s3:
            return where
        keys = {"AWS_SHARED_CREDENTIALS_FILE": str(self.s3_credentials), "AWS_PROFILE": S3_PROFILE}
        return {**where, **keys, "AWS_DEFAULT_REGION": S3_REGION}

    def ray_environment(self) -> dict[str, str]:
        """For Ray's processes and clients."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.ray_token)}
        # Ray takes the machine's outside address in place of 127.0.0.1, and listens on all; this keeps it from that.
        local = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if self.settings.host.is_loopback else {}
        return {**(token if self.settings.authentication else {"RAY_AUTH_MODE": "disabled"}), **local}

    def client_environment(self) -> dict[str, str]:
        """What a user's shell, and the worker, needs to talk to the stack: addresses, and the files of the logins."""
        found = direct_environment(self.host)
        if self.s3_endpoint is not None:
            found |= {"PPOFLOW_STORE": f"s3://{self.settings.bucket}/store", **self.s3_environment()}
        if "prefect" in self.servers:
            found["PREFECT_API_URL"] = f"{self.prefect_url}/api"
            if self.login is not None:
                found |= {"PREFECT_PROFILES_PATH": str(self.prefect_profiles), "PREFECT_PROFILE": PREFECT_PROFILE}
        if "mlflow" in self.servers:
            found["MLFLOW_TRACKING_URI"] = self.mlflow_url
            if self.settings.authentication:
                login = {"PPOFLOW_MLFLOW_CREDENTIALS": str(self.mlflow_credentials)}
                found |= {"MLFLOW_TRACKING_AUTH": "ppoflow", **login}
        if "ray" in self.servers:
            found |= {"RAY_ADDRESS": self.ray_address, **self.ray_environment()}
        return found

    def outranking(self) -> list[str]:
        """Variables of a shell that would win over the files that `client_environment` names."""
        found = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"] if "s3" in self.servers else []
        found += ["PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"] if "prefect" in self.servers else []
        if "mlflow" in self.servers:
            found += ["MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"]
        return [*found, *(["RAY_AUTH_TOKEN"] if "ray" in self.servers else [])]

    def hidden(self) -> tuple[str, ...]:
        """What of our own environment the servers do not see: a shell that talks to this stack, or to another one. Each
        is the beginning of a name."""
        aws = () if self.settings.s3 else ("AWS_",)
        postgres = () if self.settings.postgres else ("PG",)
        return ("PPOFLOW_STACK_", "PREFECT_", "MLFLOW_", "RAY_", *aws, *postgres)


def program(name: str) -> str | None:
    """The path of an installed program; the newest of several PostgreSQLs."""
    folders = sorted(Path("/").glob(PROGRAM_FOLDERS.lstrip("/")), key=lambda folder: int(folder.parts[4]), reverse=True)
    found = [shutil.which(name, path=str(folder)) for folder in folders]
    return next((path for path in found if path), None) or shutil.which(name)


def worker_home() -> Path:
    """The folder for what the worker's flow runs leave on this machine."""
    return Settings().home
