"""Encoders in ONNX form: a folder with `model.onnx` and `tokenizer.json`, or `vocab.txt` for those of the BERT kind.

A `tokenizer.json` is read by the package tokenizers, which knows every kind of tokenizer; a `vocab.txt` needs nothing
but this package. The model takes `input_ids`, `attention_mask` and perhaps `token_type_ids`; it returns one vector per
text, or one per piece, of which the mean is taken, or the first piece's. `encoder.json` beside them may state more:

    share, near         how the vectors count (`index.Counts`)
    sha256              the digest of the model
    pooling             mean (as said) or first: which vector stands for a text where there is one per piece
    query, document     words that the model wants in front of a request, and in front of the text of a tool

A model is data that somebody else may have made: onnxruntime runs it without custom operators, and what it returns is
checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from .likeness import Floats
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
        self._pooling, self._query, self._document = _manner(stated)
        self._ids, name = _tokenizer(folder)
        # The same model gives other vectors if the tokenizer, the pooling or the words in front of texts differ.
        self.model = f"onnx:{digest[:16]}{name}"
        if (self._pooling, self._document) != ("mean", ""):
            self.model += f":{sha256(f'{self._pooling} {self._document}'.encode()).hexdigest()[:8]}"
        options = runtime.SessionOptions()
        # One thread: a search must not occupy the cores that calls need.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self._inputs = {one.name for one in self._session.get_inputs()}

    def documents(self, texts: Sequence[str]) -> Floats:
        return self._encode([self._document + text for text in texts])

    def queries(self, texts: Sequence[str]) -> Floats:
        return self._encode([self._query + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> Floats:
        # One by one: a batch is as long as its longest text, and is not faster on one thread.
        return checked([self._one(text) for text in texts], len(texts))

    def _one(self, text: str) -> list[float]:
        ids = np.array([self._ids(text)], np.int64)
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        found = np.asarray(self._session.run(None, {name: given[name] for name in self._inputs})[0], np.float32)[0]
        if found.ndim == 2:
            found = found[0] if self._pooling == "first" else found.mean(axis=0)
        return cast("list[float]", found.tolist())


def _tokenizer(folder: Path) -> tuple[Callable[[str], list[int]], str]:
    """The tokenizer of a folder, and its part in the name of the model: the one of `vocab.txt` if both are there."""
    vocabulary, described = folder / "vocab.txt", folder / "tokenizer.json"
    if not vocabulary.exists() and described.exists():
        text = described.read_text()
        return _described(text), f":{sha256(text.encode()).hexdigest()[:8]}"
    pieces = WordPiece(vocabulary.read_text().splitlines())
    first, last = pieces["[CLS]"], pieces["[SEP]"]
    return lambda text: [first, *pieces.ids(text, MOST_PIECES - 2), last], ""


def _described(text: str) -> Callable[[str], list[int]]:
    """The tokenizer that a `tokenizer.json` describes, with the pieces that it puts around a text."""
    tokenizers: Any = import_module("tokenizers")
    made: Any = tokenizers.Tokenizer.from_str(text)
    made.enable_truncation(max_length=MOST_PIECES)
    made.no_padding()
    # A lone surrogate is no text to it.
    return lambda text: made.encode(text.encode(errors="replace").decode()).ids


def _manner(stated: dict[str, Any]) -> tuple[str, str, str]:
    """The way in which a text becomes one vector: the pooling, and the words in front of requests and of tools."""
    pooling, query, document = stated.get("pooling", "mean"), stated.get("query", ""), stated.get("document", "")
    if pooling not in ("mean", "first") or not isinstance(query, str) or not isinstance(document, str):
        raise ValueError("in encoder.json, pooling is mean or first, and query and document are texts")
    return pooling, query, document


def _runtime() -> Any:
    """Onnxruntime, without its telemetry, which sends names and digests of models over the network by default."""
    # It begins with the import, and calling `disable_telemetry_events` afterwards does not end it.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

    return cast("Any", onnxruntime)


def _stated(folder: Path) -> dict[str, Any]:
    path = folder / "encoder.json"
    return cast("dict[str, Any]", json.loads(path.read_text())) if path.exists() else {}
