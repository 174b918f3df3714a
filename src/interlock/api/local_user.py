"""The local user: the caller of a data directory where nobody else is named."""

from __future__ import annotations

import os
import pwd


def local_user() -> str:
    """The local user's name, from the kernel's user id. The environment (LOGNAME, USER) can name anybody."""
    uid = os.getuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
