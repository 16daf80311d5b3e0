"""Writes down which process it is, gives up root where asked to, and becomes the command.

    python -I -S infra/deploy/stack/launch.py <record> <digest> <rest of the token> <user or ""> -- command…

The record lies before the command begins, so whoever ends the stack finds the process even if its starter was killed.
"""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    record, digest, rest, user = arguments[1:5]
    command = arguments[6:]
    # Field 22 of the kernel's line is the start time; the name before it may hold anything, so count from its end.
    started = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    _write(Path(record), f"{os.getpid()}_{started}_{rest} {digest}\n")
    os.umask(0o077)
    if user:
        account = pwd.getpwnam(user)
        os.initgroups(user, account.pw_gid)
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    os.execvp(command[0], command)


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with open(beside, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
    beside.rename(path)


if __name__ == "__main__":
    main(sys.argv)
