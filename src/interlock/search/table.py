"""The table of token vectors in this package: the vector of a text is the weighted sum of those of its pieces."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Sequence
from functools import cache, cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .wordpiece import WordPiece

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_PIECES: Final = 126
_LOCAL_HEADER: Final = 30
_LONGEST_HEAD: Final = 4096


class Table:
    """Vectors of texts from a table of token vectors. It needs numpy and nothing else."""

    share = 0.7
    near = 0.4

    def __init__(self, data: bytes) -> None:
        self._data = data
        with zipfile.ZipFile(BytesIO(data)) as file:
            arrays = {one.filename.removesuffix(".npy"): _array(data, file, one) for one in file.infolist()}
        self._pieces = WordPiece(bytes(arrays["pieces"]).decode().split("\n"))
        self._vectors: NDArray[np.int8] = arrays["vectors"]
        scales = arrays["scales"].astype(np.float32)
        self._for_documents = scales * arrays["document_weights"].astype(np.float32)
        self._for_queries = scales * arrays["query_weights"].astype(np.float32)

    @property
    def model(self) -> str:
        """The name under which vectors of this table are stored."""
        return self._name

    @cached_property
    def _name(self) -> str:
        return f"table:{sha256(self._data).hexdigest()[:16]}"

    def documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._encode(self._for_documents, texts)

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._encode(self._for_queries, texts)

    def _encode(self, weights: NDArray[np.float32], texts: Sequence[str]) -> NDArray[np.float32]:
        out = np.zeros((len(texts), self._vectors.shape[1]), np.float32)
        for row, text in enumerate(texts):
            ids = self._pieces.ids(text, MOST_PIECES)
            if ids:
                out[row] = weights[ids] @ self._vectors[ids].astype(np.float32)
        return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-9)


def _array(data: bytes, file: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """An array of a file of arrays, where it is in the file: copying it would take as long as a short search."""
    if member.compress_type != zipfile.ZIP_STORED:
        with file.open(member) as compressed:
            return np.lib.format.read_array(compressed)
    start = member.header_offset + _LOCAL_HEADER
    start += sum(struct.unpack_from("<HH", data, start - 4))  # the name and what is stated besides
    head = BytesIO(data[start : start + _LONGEST_HEAD])
    if np.lib.format.read_magic(head) != (1, 0):
        with file.open(member) as other:
            return np.lib.format.read_array(other)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(head)
    found = np.frombuffer(data, dtype, math.prod(shape), start + head.tell())
    return found.reshape(shape, order="F" if is_fortran else "C")


@cache
def shipped() -> Table:
    """The table of this package."""
    return Table(Path(__file__).with_name("table.npz").read_bytes())
