"""What every test has: the ledger of requirements behind the marks, and a profile for Hypothesis."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio
from _pytest.runner import runtestprotocol

from docs import upstream_features
from interlock import Interlock
from interlock.api import dependencies, health
from interlock.data import canonical
from interlock.store import changes
from interlock.store.writer import Writer
from tests import changed, leaks, rehearsal, sample, thorough, tiers, workers
from tests.sample import TOOLS
from tests.support import postgres, redis, surroundings, zygotes
from tests.support.ledger import requirement_ids

surroundings.settle()
zygotes.share()

# Where people work, every run tries other examples; a run that decides about a change tries the same ones each time.
# `./dev test --thorough` tries new ones, and many more of them.
hypothesis.settings.register_profile(
    "search",
    deadline=None,
    max_examples=thorough.examples(60),
    print_blob=True,
    suppress_health_check=[thorough.TIMED],
)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("search"), derandomize=True)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("search"))
if not thorough.THOROUGH:
    thorough.without_constants_of_the_source()
hypothesis.settings.load_profile("thorough" if thorough.THOROUGH else "ci" if os.environ.get("CI") else "search")


def pytest_configure(config: pytest.Config) -> None:
    """What tests start must hear Ctrl-C also where the tests themselves run in the background, and do not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--server") == "wheel":
        os.environ[postgres.WHEEL] = "1"
    if config.getoption("--changed"):
        found = changed.changed_files()
        config.option.touched = None if found is None else changed.touched(found)
    workers.configure(config)


def pytest_addoption(parser: pytest.Parser) -> None:
    workers.add_option(parser)
    parser.addoption("--tier", choices=tiers.TIERS, help="run the tests of one tier")
    parser.addoption("--changed", action="store_true", help="run the tests that a change since main can touch")
    parser.addoption("--store", choices=("sqlite", "postgres"), default="sqlite", help="the database of stores")
    parser.addoption(
        "--server",
        choices=("installed", "wheel"),
        default="installed",
        help="PostgreSQL installed, or 16 of a wheel",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the test files that no change can touch, where that was asked for."""
    touched: set[str] | None = getattr(config.option, "touched", None)
    if touched is None or not collection_path.match("test_*.py") or not collection_path.is_relative_to(changed.ROOT):
        return None
    return collection_path.relative_to(changed.ROOT).as_posix() not in touched or None


def _keep_tier(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the tier that was asked for."""
    wanted = config.getoption("--tier")
    if wanted is None:
        return
    others = [item for item in items if tiers.tier_of(item.path) != wanted]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if tiers.tier_of(item.path) == wanted]


_OF_SQLITE = "sqlite_only: "


def _leave_out_sqlite(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is about the file of a store, where stores are no files. Each says why."""
    for item in items:
        mark = item.get_closest_marker("sqlite_only")
        if mark is None:
            continue
        if len(mark.args) != 1 or not isinstance(mark.args[0], str):
            raise pytest.UsageError(f"{item.nodeid}: sqlite_only must say why")
        if config.getoption("--store") == "postgres":
            item.add_marker(pytest.mark.skip(reason=_OF_SQLITE + mark.args[0]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what was left out because it is about the file of a store, by its reason."""
    skipped = (str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", []))
    reasons = [reason for _, _, reason in (words.partition(_OF_SQLITE) for words in skipped) if reason]
    if reasons:
        terminalreporter.write_line(f"{len(reasons)} tests are for SQLite only:")
        for reason, count in Counter(reasons).most_common():
            terminalreporter.write_line(f"  {count:4} {reason}")


# A test that takes long and comes last keeps one worker busy while the others have nothing left to do.
FIRST = (
    "tests/doors/conformance/",
    "tests/integrations/test_libraries.py",
    "tests/doors/test_provider_media.py",
    "tests/cli/test_demo.py",
    "tests/crash/test_kill.py",
    "tests/crash/test_chaos.py",
    "tests/store/test_fencing.py",
    "tests/deploy/test_rolling.py",
    "tests/deploy/test_rollout.py",
    "tests/golden/",
    "tests/upstreams/test_real_servers.py",
    "tests/store/test_program_before.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that names a clause the ledger does not have, or a feature that is not listed, is a mistake."""
    _keep_tier(config, items)
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    _leave_out_sqlite(config, items)
    known = requirement_ids()
    thorough.scale_examples(items)
    for item in items:
        if isinstance(item, pytest.Function) and pytest_asyncio.is_async_test(item):
            # Right behind the one it depends on, which is before all others of a single test.
            item.fixturenames.insert(item.fixturenames.index("leaves_nothing_behind") + 1, "leaves_no_task")
        for mark in item.iter_markers():
            if mark.name == "shows" and (fault := upstream_features.fault_of(*mark.args)):
                raise pytest.UsageError(f"{item.nodeid}: {fault}")
            if mark.name not in ("proves", "supports", "part_of"):
                continue
            named = mark.args[:1] if mark.name == "part_of" else mark.args
            unknown = set(named) - known
            if unknown:
                raise pytest.UsageError(f"{item.nodeid} names unknown requirements: {', '.join(sorted(unknown))}")
            if mark.name == "part_of" and not mark.kwargs.get("rest"):
                raise pytest.UsageError(f"{item.nodeid}: part_of must say what is left (rest=…)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test as pytest does, and report of its setup and teardown only where they did not pass.

    Each report is packed, sent to the process that writes them, unpacked and counted there: half a millisecond of CPU
    for these two. They are sent where `--durations` or `--junit-xml` needs them.
    """
    hook, options = item.ihook, item.config.option
    needed = options.durations is not None or options.xmlpath is not None
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or needed or not report.passed:
            hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect without the garbage collector: nothing is garbage yet, and looking for it takes a tenth of the time."""
    with thorough.no_collection():
        return (yield)


def pytest_collection_finish() -> None:
    """Leave all modules and tests out of later garbage collections: each would take half a second for them alone.

    So would one now, in each process, to find the little that is garbage.
    """
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def later_collections_are_short() -> Iterator[None]:
    """Leave what a module has loaded and cached out of later garbage collections too.

    Many tests collect garbage to find what is left. In a whole run each of these would look at all that the tests
    before it have loaded, which takes more than a second of CPU.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def own_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ...]]:
    """The directories in which no test may leave a file."""
    yield from leaks.own_places(tmp_path_factory)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    """A PostgreSQL server that the tests of this process share; each makes a schema of its own."""
    server = postgres.Server()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[redis.Server]:
    """A Redis server that the tests of this process share. One that ends it makes a server of its own."""
    server = redis.Server()
    yield server
    server.remove()


@pytest.fixture
def closed_port() -> Iterator[Callable[[], int]]:
    """Name ports at which nobody listens, unless the test does with `reuse_port`. No other process gets them."""
    with ExitStack() as held:

        def port() -> int:
            one = held.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind(("127.0.0.1", 0))
            return int(one.getsockname()[1])

        yield port


@pytest.fixture
def make_redis() -> Iterator[Callable[..., redis.Server]]:
    """Make Redis servers that a test may end, with options of its own."""
    made: list[redis.Server] = []

    def make(*options: str) -> redis.Server:
        made.append(redis.Server(*options))
        return made[-1]

    yield make
    for server in made:
        server.remove()


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """Wait longer for stores and services than servers do: on a busy machine they may not answer for a while.

    A test about one that does not answer at all sets the limit that it needs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "_PATIENCE_S", 60.0)
        patch.setattr(changes, "_PATIENCE_HERE_S", 60.0)
        patch.setattr(health, "READY_WITHIN_S", 60.0)
        patch.setattr(dependencies, "ASK_S", 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def chosen_stores(request: pytest.FixtureRequest) -> Iterator[postgres.Stores | None]:
    """With `--store postgres`, every data directory that is opened has a store on PostgreSQL, and Redis beside it."""
    if request.config.getoption("--store") != "postgres":
        yield None
        return
    with pytest.MonkeyPatch.context() as patch:
        server: postgres.Server = request.getfixturevalue("postgres_server")
        beside: redis.Server = request.getfixturevalue("redis_server")
        patch.setenv(postgres.GIVEN, server.address)
        patch.setenv(postgres.REDIS, beside.url)
        patch.setenv("PYTHONPATH", postgres.INTERPRETER, prepend=os.pathsep)
        patch.setattr("interlock.store.postgres.leases.BELIEVED_S", 0.0)  # tests kill processes and ask at once
        stores = postgres.use(os.environ)
        assert stores is not None
        stores.make()
        yield stores
        stores.close()


# One fixture for all that is checked around each test: pytest takes 0.1 ms of CPU for each fixture of each test.
@pytest.fixture(autouse=True)
def leaves_nothing_behind(
    chosen_stores: postgres.Stores | None, own_places: tuple[Path, ...], request: pytest.FixtureRequest
) -> Iterator[None]:
    """No test leaves a thread, a child process, a file descriptor or a file behind (see tests/leaks.py).

    Nor does it keep something on loan, and no unit of the journal differs between two runs, not even where nobody waits
    for its answer. The stores of tests that have ended are dropped.
    """
    if chosen_stores is not None:
        chosen_stores.sweep()
    rehearsal.broken.clear()
    if leaks.together(request.node):
        yield
    else:
        yield from leaks.check(own_places)
    assert not rehearsal.broken
    # Whatever was lent is given back: then, and only then, records of the log are made as ever.
    assert logging.getLogRecordFactory() is logging.LogRecord


@pytest.fixture(scope="module")
def module_leaves_nothing_behind(own_places: tuple[Path, ...]) -> Iterator[None]:
    """Tests of a module that share a home with a sandbox are checked together, when the home is closed."""
    yield from leaks.check(own_places)


@pytest_asyncio.fixture
async def leaves_no_task(leaves_nothing_behind: None) -> AsyncGenerator[None]:
    """No async test leaves a task behind on its loop. Every async test has it (see the collection hook)."""
    before = asyncio.all_tasks()
    yield
    leaks.fail(await leaks.tasks_left(before))


# Every unit of every test runs twice: see the contract at the head of store/journal.py.
Writer.perform = staticmethod(rehearsal.rehearse)


@pytest.fixture(scope="module", params=["compiled", "interpreted"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """For what must be the same where the walk over JSON data was compiled, and where it could not be."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "interpreted":
            patch.setattr("interlock.data.canonical.compiled", None)
            patch.setattr("interlock.data.canonical.plain_form", canonical.nothing_plain)
            patch.setattr("interlock.gateway.request.plain_form", canonical.nothing_plain)
            patch.setattr("interlock.privacy.redact.compiled", None)
            patch.setattr("interlock.data.schema_plan.compiled", None)
        elif canonical.compiled is None:
            assert not os.environ.get("CI"), "the walk is not compiled: is there a C compiler, and did ./dev sync run?"
            pytest.skip("the walk is not compiled: there was no C compiler when ./dev sync ran")
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def prepared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the sample tools are admitted; tests work on copies."""
    home = tmp_path_factory.mktemp("prepared")
    async with Interlock.open(home) as app:
        await app.add(*TOOLS)
    return home


@pytest.fixture
def home(prepared_home: Path, tmp_path: Path) -> Path:
    sample.reset()
    return Path(shutil.copytree(prepared_home, tmp_path / "home"))


@pytest_asyncio.fixture
async def app(home: Path) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home) as opened:
        for one in TOOLS:
            opened.catalog.attach(one)
        yield opened
