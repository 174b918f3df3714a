"""Vectors of tools in a file of the data directory, so that a restart does not compute them again.

One file per model. Its first line names the model and the dimension; records of one size follow: the SHA-256 of a text,
and its vector. Records are appended in one write under a lock, as several processes may share the directory. A file
that cannot be read, is of another form or has grown too large is begun anew: all of it can be computed again.
"""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np
import orjson

from .index import Floats

MOST_BYTES: Final = 512 * 2**20


class Remembered:
    """Vectors of one model. Not for several threads at once."""

    def __init__(self, folder: Path, model: str) -> None:
        self._path = folder / f"{sha256(model.encode()).hexdigest()[:16]}.vectors"
        self._model = model
        self._vectors: dict[bytes, Floats] | None = None

    def get(self, texts: Sequence[str]) -> list[Floats | None]:
        if self._vectors is None:
            self._vectors = self._read()
        return [self._vectors.get(_digest(text)) for text in texts]

    def put(self, texts: Sequence[str], vectors: Floats) -> None:
        """Remember vectors. A file that cannot be written costs a restart its time, and nothing else."""
        rows = [(_digest(text), vector.astype("<f2")) for text, vector in zip(texts, vectors, strict=True)]
        known = self._vectors if self._vectors is not None else {}
        known.update((digest, vector.astype(np.float32)) for digest, vector in rows)
        head = _head(self._model, vectors.shape[1])
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(self._path, "a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                size = file.tell()
                file.seek(0)
                record = 32 + 2 * vectors.shape[1]
                whole = size - (size - len(head)) % record
                if file.read(len(head)) != head or size > MOST_BYTES:
                    file.truncate(0)
                    file.write(head)
                elif whole < size:
                    file.truncate(whole)
                file.write(b"".join(digest + vector.tobytes() for digest, vector in rows))
        except OSError:
            pass

    def _read(self) -> dict[bytes, Floats]:
        try:
            data = self._path.read_bytes() if self._path.stat().st_size <= 2 * MOST_BYTES else b""
            head = orjson.loads(data.partition(b"\n")[0])
            width = int(head["dimension"])
            first = _head(self._model, width)
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        size = 32 + 2 * width
        if not data.startswith(first) or width < 1:
            return {}
        found: dict[bytes, Floats] = {}
        for start in range(len(first), len(data) - size + 1, size):
            vector = np.frombuffer(data, "<f2", width, start + 32).astype(np.float32)
            if np.isfinite(vector).all():
                found[data[start : start + 32]] = vector
        return found


def _head(model: str, width: int) -> bytes:
    return orjson.dumps({"model": model, "dimension": width}) + b"\n"


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogatepass")).digest()
