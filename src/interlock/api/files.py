"""Files of the data directory that an endpoint may write."""

from __future__ import annotations

import os
from pathlib import Path

from interlock.core.errors import Failure


def keep(path: Path, content: bytes) -> None:
    """A file that is the old or the new one at every moment, also after a power cut."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        raise Failure("E3801", f"the data directory cannot be written: {error.strerror}") from None
    finally:
        staged.unlink(missing_ok=True)
