"""Encoders whose vectors take long: a model on this machine, or a service that others run.

Their vectors are made beside the searches, in batches, and stored (`api.tool_vectors`). `Away` says that no vector
could be had; searches by words go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from interlock.core.errors import Failure
from interlock.core.threads import DEFINITIONS, WALKS, Threads
from interlock.net.outgoing import Outgoing, Trouble, Unanswered

from .index import Encoder
from .likeness import Floats
from .onnx import NEAR, SHARE, OnnxEncoder
from .packaged import installed
from .table import shipped
from .vectors import MOST_NUMBERS, checked

# How many texts are sent to a service at once, and how long it may take.
BATCH: Final = 32
DOCUMENTS_S: Final = 60.0
QUERY_S: Final = 5.0
# A number of a vector takes up to this many bytes of JSON.
_BYTES_PER_NUMBER: Final = 26
_WORDS: Final[dict[Trouble, str]] = {
    "unreachable": "cannot be reached", "late": "does not answer in time", "flooded": "sends headers without end",
    "too long": "answers with more than vectors", "compressed": "compresses its answers, which are not accepted",
}  # fmt: skip

Key = Callable[[], Awaitable[str | None]]


class Away(Exception):  # noqa: N818 - a finding about the encoder
    """There are no vectors at the moment. The text says why."""


class Embedder(Protocol):
    """Vectors of texts. `model` names what made them: vectors of different models cannot be compared."""

    model: str
    share: float
    near: float

    async def documents(self, texts: Sequence[str]) -> Floats: ...

    async def queries(self, texts: Sequence[str]) -> Floats: ...


class Local(Encoder, Protocol):
    """An encoder of this machine."""

    @property
    def model(self) -> str: ...


class OnThread:
    """An encoder of this machine, on a thread."""

    def __init__(self, encoder: Local) -> None:
        self.model, self.share, self.near = encoder.model, encoder.share, encoder.near
        self._encoder = encoder

    async def documents(self, texts: Sequence[str]) -> Floats:
        return await self._run(DEFINITIONS, self._encoder.documents, texts)

    async def queries(self, texts: Sequence[str]) -> Floats:
        return await self._run(WALKS, self._encoder.queries, texts)

    async def _run(self, threads: Threads, encode: Callable[[Sequence[str]], Floats], texts: Sequence[str]) -> Floats:
        try:
            return await threads.run(encode, texts)
        except Exception as error:  # noqa: BLE001 - a model that others made may fail in any way
            raise Away(f"the encoder failed ({type(error).__name__})") from None


class Nothing:
    """In place of an encoder that cannot be used."""

    model, share, near = "none", SHARE, NEAR

    def __init__(self, why: str) -> None:
        self._why = why

    async def documents(self, texts: Sequence[str]) -> Floats:
        raise Away(self._why)

    async def queries(self, texts: Sequence[str]) -> Floats:
        raise Away(self._why)


class EmbeddingService:
    """A service with the API of Ollama (`/api/embed`) or of OpenAI (`/v1/embeddings`)."""

    share, near = SHARE, NEAR

    def __init__(self, kind: str, model: str, url: str, key: Key) -> None:
        self.model = f"{kind}:{model}@{url}"
        self._name, self._key = model, key
        base = url.rstrip("/")
        self._ollama = kind == "ollama"
        if self._ollama:
            self._url = f"{base}/api/embed"
        else:
            self._url = f"{base}/embeddings" if base.endswith("/v1") else f"{base}/v1/embeddings"
        self._client = Outgoing("any" if url.startswith("https:") else "private", connections=4)
        self._width: int | None = None

    async def documents(self, texts: Sequence[str]) -> Floats:
        return await self._ask(texts, DOCUMENTS_S)

    async def queries(self, texts: Sequence[str]) -> Floats:
        return await self._ask(texts, QUERY_S)

    async def _ask(self, texts: Sequence[str], timeout_s: float) -> Floats:
        headers = {"content-type": "application/json", "accept": "application/json"}
        try:
            key = await self._key()
            if key:
                headers["authorization"] = f"Bearer {key}"
            answer = await self._client.ask(
                "POST",
                self._url,
                headers=headers,
                body=orjson.dumps({"model": self._name, "input": list(texts)}),
                most=len(texts) * MOST_NUMBERS * _BYTES_PER_NUMBER + 65_536,
                timeout_s=timeout_s,
            )
        except Unanswered as silence:
            raise Away(f"the encoder {_WORDS[silence.why]}") from None
        except Failure as refused:
            raise Away(f"the encoder is not asked: {refused.message}") from None
        if answer.status != 200:
            raise Away(f"the encoder answered with status {answer.status}")
        try:
            vectors = await WALKS.run(_read, answer.body, len(texts), self._width, self._ollama)
        except ValueError as error:
            raise Away(f"the encoder's answer cannot be used: {error}") from None
        self._width = vectors.shape[1]
        return vectors


def _read(body: bytes, count: int, width: int | None, ollama: bool) -> Floats:
    """The vectors of an answer, in the order of the texts."""
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise ValueError("it is not JSON") from None
    try:
        if ollama:
            return checked(document["embeddings"], count, width)
        by_place = {one["index"]: one["embedding"] for one in document["data"]}
        return checked([by_place[place] for place in range(count)], count, width)
    except (KeyError, TypeError):
        raise ValueError("it does not have the form of vectors") from None


async def opened(setting: str, home: Path, key: Key, *, apart: bool = False) -> Embedder | None:
    """The encoder that the setting `search_encoder` names; None for none at all.

    None also for the table of this package, with which the index makes vectors itself, unless they are kept `apart`.
    """
    kind, colon, rest = setting.partition(":")
    if colon and kind in ("ollama", "openai"):
        model, _, url = rest.rpartition("@")
        return EmbeddingService(kind, model, url, key)
    if setting == "none":
        return None
    folder = await DEFINITIONS.run(installed) if setting in ("auto", "package") else None
    if setting == "table" or (setting == "auto" and folder is None):
        return OnThread(await DEFINITIONS.run(shipped)) if apart else None
    if setting in ("auto", "package"):
        if folder is None:
            return Nothing("interlock-search-encoder is not installed")
    else:
        folder = home / setting
    try:
        return OnThread(await DEFINITIONS.run(partial(OnnxEncoder, folder)))
    except asyncio.CancelledError:
        raise
    except ModuleNotFoundError as missing:
        return Nothing(f"{missing.name} is not installed, which the encoder needs")
    except Exception as error:  # noqa: BLE001 - files that others made may be damaged in any way
        reason = str(error) if isinstance(error, ValueError) else type(error).__name__
        return Nothing(f"the encoder cannot be loaded ({reason})")
