"""The encoder's files: `model.onnx` (int8), `vocab.txt`, and `encoder.json`, which says how its vectors count."""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """The folder of the files, for Interlock's entry point `interlock.search_encoders`."""
    return Path(__file__).parent
