"""The login of this user: a server and a token, in a file that only its owner can read.

Only the standard library is imported here: the file is looked at before every command that names no server and no data
directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import asdict
from pathlib import Path

import click

from interlock.core.record import dataclass

_MOST_BYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class Login:
    """The server that commands are sent to, and the token that they are sent with."""

    server: str
    token: str
    # Whether the user allowed plain HTTP to a server elsewhere.
    insecure: bool = False


def login_file() -> Path:
    """The file of the login: `login.json` in the user's configuration directory."""
    import platformdirs

    return Path(platformdirs.user_config_dir("interlock")) / "login.json"


def stored_login() -> Login | None:
    """The login; None if there is none. A file that others can read or write is refused, and so is a damaged one."""
    path = login_file()
    try:
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            if stat.S_IMODE(facts.st_mode) & 0o077 or facts.st_uid != os.geteuid():
                raise click.UsageError(f"others can read or write `{path}`, which holds a token; log in again")
            document = json.loads(file.read(_MOST_BYTES))
        return Login(str(document["server"]), str(document["token"]), document["insecure"] is True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise click.UsageError(f"`{path}` cannot be read as a login; log in again, or remove it") from None


def store_login(login: Login) -> None:
    """Write the login. INVARIANT: the file is never readable by others, not even while it is written."""
    import tempfile

    path = login_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # with mode 0600
    try:
        with open(descriptor, "w") as file:
            json.dump(asdict(login), file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def remove_login() -> bool:
    """Remove the login. Returns whether there was one."""
    with contextlib.suppress(FileNotFoundError):
        login_file().unlink()
        return True
    return False
