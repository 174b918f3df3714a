"""Encoders of the BERT kind in ONNX form: a folder with `model.onnx` and `vocab.txt`.

`encoder.json` beside them may state how the vectors count: `share`, `near`, and the digest of the model. It takes
`input_ids`, `attention_mask` and perhaps `token_type_ids`; it returns one vector per text, or one per piece, of which
the mean is taken. A model is data that somebody else may have made: onnxruntime runs it without custom operators, and
what it returns is checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from .index import Floats
from .vectors import checked
from .wordpiece import WordPiece

MOST_PIECES: Final = 128
# How vectors of a model count of which nothing is stated. What is near differs between models, so all tools are.
SHARE: Final = 0.5
NEAR: Final = -1.0


class OnnxEncoder:
    """Vectors of texts from a model that runs on this machine. Calls may come from several threads."""

    def __init__(self, folder: Path) -> None:
        runtime = _runtime()
        data = (folder / "model.onnx").read_bytes()
        digest = sha256(data).hexdigest()
        stated = _stated(folder)
        if stated.get("sha256", digest) != digest:
            raise ValueError("model.onnx is not the one that encoder.json describes")
        self.share = float(stated.get("share", SHARE))
        self.near = float(stated.get("near", NEAR))
        self.model = f"onnx:{digest[:16]}"
        self._pieces = WordPiece((folder / "vocab.txt").read_text().splitlines())
        self._first, self._last = self._pieces["[CLS]"], self._pieces["[SEP]"]
        options = runtime.SessionOptions()
        # One thread: a search must not occupy the cores that calls need.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self._inputs = {one.name for one in self._session.get_inputs()}

    def documents(self, texts: Sequence[str]) -> Floats:
        return self._encode(texts)

    def queries(self, texts: Sequence[str]) -> Floats:
        return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> Floats:
        # One by one: a batch is as long as its longest text, and is not faster on one thread.
        return checked([self._one(text) for text in texts], len(texts))

    def _one(self, text: str) -> list[float]:
        ids = np.array([[self._first, *self._pieces.ids(text, MOST_PIECES - 2), self._last]], np.int64)
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        found = np.asarray(self._session.run(None, {name: given[name] for name in self._inputs})[0], np.float32)[0]
        return cast("list[float]", (found.mean(axis=0) if found.ndim == 2 else found).tolist())


def _runtime() -> Any:
    """Onnxruntime, without its telemetry, which sends names and digests of models over the network by default."""
    # It begins with the import, and calling `disable_telemetry_events` afterwards does not end it.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

    return cast("Any", onnxruntime)


def _stated(folder: Path) -> dict[str, Any]:
    path = folder / "encoder.json"
    return cast("dict[str, Any]", json.loads(path.read_text())) if path.exists() else {}
