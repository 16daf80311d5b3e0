"""The stack's passwords: made once, kept in one file that only its owner can read; every other file is made from it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.deploy.stack.service import StackError

PRIVATE = 0o600
ADMIN = "admin"


Password = Annotated[str, Field(repr=False, min_length=16)]


class Credentials(BaseModel):
    """Every password of the stack."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stack: Password
    """Not a password: marks this stack's processes, so that only they are ever ended."""
    postgres: Password
    prefect: Password
    mlflow: Password
    mlflow_cookies: Password
    ray: Password
    s3_access_key: Password
    s3_secret_key: Password


def load_credentials(path: Path) -> Credentials:
    """The passwords in a file, which is made now if there is none."""
    if not path.exists():
        new = {name: secrets.token_hex(10 if name == "s3_access_key" else 24) for name in Credentials.model_fields}
        write_private(path, Credentials(**new).model_dump_json())
    if path.stat().st_mode & 0o077:
        raise StackError(f"{path} can be read by others: chmod 600 {path}, or delete it and the stack's folder")
    try:
        return Credentials.model_validate_json(path.read_bytes())
    except ValidationError:
        # Not the validator's own message: it quotes what it read.
        raise StackError(f"{path} is damaged: delete it together with the stack's folder, and start anew") from None


def write_private(path: Path, content: str) -> None:
    """Write a file that only its owner can ever read, completely or not at all; what root replaces keeps its owner."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "w", encoding="utf-8") as file:
        file.write(content)
        if os.geteuid() == 0 and path.exists():
            os.fchown(file.fileno(), path.stat().st_uid, path.stat().st_gid)
    beside.rename(path)
