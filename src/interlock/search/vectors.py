"""Vectors that come from elsewhere: checked, of length one."""

from __future__ import annotations

from typing import Any

import numpy as np

from .likeness import Floats

MOST_NUMBERS = 8192
_LARGEST = 1e15


def checked(rows: Any, count: int, width: int | None = None) -> Floats:
    """Return `count` vectors of one dimension and of length one; ValueError if they are anything else."""
    try:
        vectors = np.asarray(rows, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("the vectors are not lists of numbers of one length") from None
    if vectors.ndim != 2 or len(vectors) != count or not 0 < vectors.shape[1] <= MOST_NUMBERS:
        raise ValueError(f"there should be {count} vectors of up to {MOST_NUMBERS} numbers")
    if width is not None and vectors.shape[1] != width:
        raise ValueError(f"the vectors have {vectors.shape[1]} numbers, and had {width} before")
    if not (np.abs(vectors) < _LARGEST).all():
        raise ValueError("the vectors hold numbers that are not finite")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-9)).astype(np.float32)
