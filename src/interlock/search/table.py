"""The table of token vectors in this package: the vector of a text is the weighted sum of those of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from io import BytesIO
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .wordpiece import WordPiece

MOST_PIECES: Final = 126


class Table:
    """Vectors of texts from a table of token vectors. It needs numpy and nothing else."""

    share = 0.7
    near = 0.4

    def __init__(self, data: bytes) -> None:
        self.model = f"table:{sha256(data).hexdigest()[:16]}"
        with np.load(BytesIO(data)) as file:
            self._pieces = WordPiece(bytes(file["pieces"]).decode().split("\n"))
            self._vectors: NDArray[np.int8] = file["vectors"]
            scales = file["scales"].astype(np.float32)
            self._for_documents = scales * file["document_weights"].astype(np.float32)
            self._for_queries = scales * file["query_weights"].astype(np.float32)

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


@cache
def shipped() -> Table:
    """The table of this package."""
    return Table(files("interlock.search").joinpath("table.npz").read_bytes())
