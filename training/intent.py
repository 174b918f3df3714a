"""Trains the model that names the kind of help a request needs: `python -m training.intent OUT.npz`.

The labels come from the names and descriptions of our own tools in `own/` (`interlock.selection.kinds`): a request for
a tool that is named `get_…` asks to read. `own/none.txt` has requests that need no tool. A fifth is held out for the
figures, by file; the weights are then made from all of it. Runs on one processor in a minute, with the same result.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from bench import sets
from interlock.search.index import Floats
from interlock.search.table import shipped
from interlock.selection.intent import LEAST, THRESHOLD, features, seen_words, softmax
from interlock.selection.kinds import KINDS, Kind, named_kinds

HERE = Path(__file__).parent
LEAST_COUNT = 4
STEPS, RATE, DECAY = 150, 0.1, 1e-3
NONE_WEIGHT = 3.0

Labelled = tuple[str, frozenset[Kind]]


def labelled() -> list[tuple[int, str, frozenset[Kind]]]:
    """Requests with the kinds of help that their tools give, and the fifth that they are in."""
    found: list[tuple[int, str, frozenset[Kind]]] = []
    for number, path in enumerate(sorted((HERE / "own").glob("*.jsonl"))):
        for tool in map(json.loads, path.read_text().splitlines()):
            if "task" in tool:  # needs several tools, so it has no one kind
                continue
            kinds = named_kinds(tool["name"], tool["description"])
            found += [(number % 5, request, kinds) for request in tool["requests"] if kinds]
    lines = (HERE / "own" / "none.txt").read_text().splitlines()
    return found + [(number % 5, line, frozenset(("none",))) for number, line in enumerate(lines)]


def from_sets() -> list[Labelled]:
    """Requests of the shipped set BFCL, by the name of the tool that each one needs."""
    told = sets.load(sets.HERE / "bfcl")
    names = {one.id: one.name for one in told.entries}
    each = ((one.text, named_kinds(names[min(one.needed[0])])) for one in told.queries)
    return [(text, kinds) for text, kinds in each if kinds]


def train(rows: Floats, wanted: Floats, weights: Floats) -> Floats:
    """Least cross-entropy with decay, by Adam over all rows, from zero."""
    made = np.zeros((rows.shape[1], wanted.shape[1]), np.float32)
    first, second = np.zeros_like(made), np.zeros_like(made)
    for step in range(1, STEPS + 1):
        gradient = rows.T @ ((softmax(rows @ made) - wanted) * weights[:, None]) / weights.sum() + DECAY * made
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        made -= RATE * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
    return made


def figures(name: str, found: Floats, wanted: list[frozenset[Kind]]) -> None:
    best, sure = found.argmax(axis=1), found.max(axis=1) >= THRESHOLD
    right = np.array([KINDS[place] in kinds for place, kinds in zip(best, wanted, strict=True)])
    lost = np.array(
        [sum(row[KINDS.index(kind)] for kind in kinds) < LEAST for row, kinds in zip(found, wanted, strict=True)]
    )
    print(
        f"{name}: {len(wanted):,} requests, {right.mean():.3f} right; with a verdict {sure.mean():.3f},"
        f" of these right {right[sure].mean():.3f}; tool left out {(lost & sure).mean():.4f}"
    )


def main(out: str) -> None:
    rows = labelled()
    texts, kinds = [text for _, text, _ in rows], [one for _, _, one in rows]
    counted = Counter(word for text in texts for word in seen_words(text))
    vocabulary = {word: place for place, word in enumerate(sorted(w for w, n in counted.items() if n >= LEAST_COUNT))}
    made = features(texts, vocabulary, shipped())
    wanted = np.array([[(kind in one) / len(one) for kind in KINDS] for one in kinds], np.float32)
    weights = np.array([NONE_WEIGHT if one == {"none"} else 1.0 for one in kinds], np.float32)
    kept = np.array([fifth != 0 for fifth, _, _ in rows])
    tried = train(made[kept], wanted[kept], weights[kept])
    figures("held out", softmax(made[~kept] @ tried), [one for one, keep in zip(kinds, kept, strict=True) if not keep])
    final = train(made, wanted, weights)
    asked = from_sets()
    rows_asked = features([text for text, _ in asked], vocabulary, shipped())
    figures("BFCL", softmax(rows_asked @ final), [one for _, one in asked])
    listed = np.frombuffer("\n".join(vocabulary).encode(), np.uint8)
    with Path(out).open("wb") as file:
        np.savez_compressed(file, words=listed, weights=final.astype(np.float16))


if __name__ == "__main__":
    main(sys.argv[1])
