"""Vectors of tools that take long to make: in the memory of this process, or in the database of the store.

`InMemory` has them in the index, which compares them itself, and remembers them in a file of the data directory.
`InStore` has them in a PostgreSQL database with pgvector, which compares them (the setting `search_vectors`): they are
made once for all machines of a store, and take no memory here. The scores of a search are the same with both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

from interlock.core.errors import Failure
from interlock.core.threads import DEFINITIONS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from interlock.api.parts import Parts
    from interlock.search.embedders import Embedder
    from interlock.search.index import Index, Mask
    from interlock.search.likeness import Floats
    from interlock.store.postgres.vectors import VectorTable
    from interlock.store.vector_cache import VectorCache

_log = logging.getLogger("interlock.search")


class VectorPlace(Protocol):
    """The place of the vectors that an encoder has made of tools."""

    async def missing(self, tools: Sequence[str], texts: Sequence[str], width: int) -> list[int]:
        """Use the vectors of `width` numbers that are there for tools with these texts; return the places of the others
        in the lists.
        """
        ...

    async def put(self, tools: Sequence[str], texts: Sequence[str], vectors: Floats) -> None:
        """Use vectors for tools with these texts, and store them."""
        ...

    async def similar(self, mask: Mask, asked: Floats, most: int | None) -> Floats | None:
        """The similarities of texts to tools, as `Index.search` takes them; None where the index compares itself.

        With `most`, so many tools that are nearest to the first text are enough.
        """
        ...


class InMemory:
    """Vectors in the index."""

    def __init__(self, index: Index, cache: VectorCache) -> None:
        self._index = index
        self._cache = cache

    async def missing(self, tools: Sequence[str], texts: Sequence[str], width: int) -> list[int]:
        return await DEFINITIONS.run(self._use, tools, texts, width)

    def _use(self, tools: Sequence[str], texts: Sequence[str], width: int) -> list[int]:
        import numpy as np

        digests = [_digest(text) for text in texts]
        known = self._cache.get(digests)
        found: dict[str, Floats] = {}
        missing: list[int] = []
        for place, (tool, digest) in enumerate(zip(tools, digests, strict=True)):
            vector = np.frombuffer(known.get(digest, b""), "<f2").astype(np.float32)
            if len(vector) == width and np.isfinite(vector).all():
                found[tool] = vector
            else:
                missing.append(place)
        if found:
            self._index.place(list(found), np.stack(list(found.values())))
        return missing

    async def put(self, tools: Sequence[str], texts: Sequence[str], vectors: Floats) -> None:
        await DEFINITIONS.run(self._put, tools, texts, vectors)

    def _put(self, tools: Sequence[str], texts: Sequence[str], vectors: Floats) -> None:
        import numpy as np

        stored = vectors.astype("<f2")
        self._index.place(tools, stored.astype(np.float32))
        rows = [(_digest(text), vector.tobytes()) for text, vector in zip(texts, stored, strict=True)]
        self._cache.put(vectors.shape[1], rows)

    async def similar(self, mask: Mask, asked: Floats, most: int | None) -> Floats | None:
        return None


class InStore:
    """Vectors in the database."""

    def __init__(self, parts: Parts, index: Index, table: VectorTable, model: str) -> None:
        self._parts = parts
        self._index = index
        self._table = table
        self._model = model

    async def missing(self, tools: Sequence[str], texts: Sequence[str], width: int) -> list[int]:
        digests = [_digest(text) for text in texts]
        look = partial(self._table.numbers, model=self._model, dimension=width, digests=digests)
        numbers = await self._parts.readers.read(look)
        pairs = zip(tools, digests, strict=True)
        self._index.refer({tool: numbers[digest] for tool, digest in pairs if digest in numbers})
        return [place for place, digest in enumerate(digests) if digest not in numbers]

    async def put(self, tools: Sequence[str], texts: Sequence[str], vectors: Floats) -> None:
        rows = list(zip(map(_digest, texts), vectors.tolist(), strict=True))
        await self._parts.journal.commit(partial(self._table.put, model=self._model, rows=rows))
        await self.missing(tools, texts, vectors.shape[1])

    async def similar(self, mask: Mask, asked: Floats, most: int | None) -> Floats | None:
        import numpy as np

        from interlock.search.likeness import CANDIDATES  # so many are compared with the sentences of a request

        rows = self._index.rows(mask)
        numbers = np.unique(rows[rows > 0]).tolist()
        enough = None if most is None else most + CANDIDATES
        work = partial(self._table.similar, numbers=numbers, asked=asked.tolist(), most=enough)
        found = await self._parts.readers.read(work) if numbers else []
        return await DEFINITIONS.run(_by_place, rows, found, len(asked))


def _by_place(rows: NDArray[np.int64], compared: Sequence[tuple[float, ...]], texts: int) -> Floats:
    """Similarities that a database has computed, by the numbers of its rows, in the order of the tools of a mask."""
    import numpy as np

    similar = np.full((texts, len(rows)), np.nan, np.float32)
    if compared:
        table = np.array(sorted(compared), np.float64)
        at = np.minimum(np.searchsorted(table[:, 0], rows), len(table) - 1)
        there = table[at, 0] == rows
        similar[:, there] = table[at[there], 1:].T
    return similar


def place_of(parts: Parts, index: Index, embedder: Embedder, table: VectorTable | None) -> VectorPlace:
    """The place of the vectors of an encoder."""
    from interlock.store.vector_cache import VectorCache

    if table is not None:
        return InStore(parts, index, table, embedder.model)
    return InMemory(index, VectorCache(parts.home.path / "search" / "vectors.db", embedder.model))


async def table_of(parts: Parts) -> VectorTable | None:
    """The table of vectors in the store, if the settings ask for one and the database can have it."""
    if parts.settings.search_vectors != "store":
        return None
    from interlock.store.postgres.vectors import NoVectors, opened

    try:
        return await DEFINITIONS.run(opened, parts.home)
    except (NoVectors, Failure) as reason:
        words = reason.message if isinstance(reason, Failure) else reason
        _log.warning("vectors of tools are in memory, not in the store: %s", words)
        return None


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogatepass")).digest()
