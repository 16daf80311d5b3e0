"""Who is at work here, for what people will ask later."""

from __future__ import annotations

import os
import pwd
import socket


def current_user() -> str:
    """The user of this process and its machine, as user@host."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under a number that nobody has named
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
