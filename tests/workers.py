"""Runs the tests in several processes: `-n 4`, `-n auto` (the default), or `-n 0` for this process alone.

One process collects the tests, and the workers are forked off it. They share the program and the tests that it has
loaded, which would take ten seconds of CPU and a quarter of a gigabyte in each. This process runs no test: it hands
them out, one at a time, and passes the reports of the workers on to pytest, as if it had run them itself.

A worker gets the tests of one module after the other, so that it makes the fixtures of a module once. When no module is
left, it gets the second half of what another has before it.

A worker that dies takes the test that it ran with it, which is reported as failed; another goes on with the rest. The
workers hear Ctrl-C themselves, and end with this process, also where that is killed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

import pytest
from _pytest.capture import FDCapture

PATIENCE_S = 10.0  # for a worker to end its test, and then for it to end after Ctrl-C
MOST_DEATHS = 8
MANY = 10  # of directories, files and tests that were named: as many as in a run of all tests, commands are started
_PASSED_ON = (KeyboardInterrupt, pytest.exit.Exception)
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl


def add_option(parser: pytest.Parser) -> None:
    group: Any = parser.getgroup("workers")
    # Lower-case letters are pytest's own; people know this one from pytest-xdist.
    group._addoption(
        "-n", dest="workers", metavar="N", type=_number, default=0, help="run the tests in N processes, or auto"
    )


def _number(word: str) -> int:
    """Four workers for two cores: tests wait for processes, threads and clients for a part of their time."""
    if word != "auto":
        return int(word)
    cores = len(os.sched_getaffinity(0))
    return cores + max(2, cores // 2)


def configure(config: pytest.Config) -> None:
    """Have workers run the tests, unless this process shall run them, or somebody wants to debug them."""
    if config.option.workers and not (config.option.usepdb or config.option.trace):
        config.pluginmanager.register(Workers(config), "workers")
        whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS or len(config.args) >= MANY
        if whole and not config.option.collectonly:
            _load_once(config)
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # tests of several files end in turn


def _load_once(config: pytest.Config) -> None:
    """Load the program for commands and programs of the tests once for all workers, while the tests are collected."""
    from tests import warm

    config.add_cleanup(warm.Shared().end)


class Schedule:
    """The tests that no worker has yet, and those that each worker has before it, by their numbers."""

    def __init__(self, modules: Iterable[object]) -> None:
        """Take the module of each test. The order of modules is that of their first tests."""
        self._modules: dict[object, deque[int]] = {}
        for number, module in enumerate(modules):
            self._modules.setdefault(module, deque()).append(number)
        self._waiting = deque(self._modules.values())
        self._of: dict[int, deque[int]] = {}

    def take(self, worker: int) -> tuple[int, int | None] | None:
        """The next test of a worker, and the one that it will get after it if both are of one module."""
        own = self._of.setdefault(worker, deque())
        if not own:
            own = self._of[worker] = self._waiting.popleft() if self._waiting else self._half_of_another()
        return (own.popleft(), own[0] if own else None) if own else None

    def give_back(self, worker: int) -> None:
        """Have others run what a worker had before it."""
        rest = self._of.pop(worker)
        if rest:
            self._waiting.appendleft(rest)

    def _half_of_another(self) -> deque[int]:
        """The second half of what is before a worker, at least without the test that it gets next in any case."""
        most = max(self._of.values(), key=len)
        return deque(reversed([most.pop() for _ in range(len(most) // 2)]))


class _Worker:
    """A worker as the process that started it sees it, and the test that it runs."""

    def __init__(self, number: int, pid: int, connection: Connection) -> None:
        self.number, self.pid, self.connection = number, pid, connection
        self.test: int | None = None

    def ends(self, within_s: float) -> bool:
        """Whether it ends in time."""
        descriptor = os.pidfd_open(self.pid)
        try:
            return bool(select.select([descriptor], [], [], within_s)[0])
        finally:
            os.close(descriptor)


class Workers:
    """The plugin of the process that collects the tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config: Any = config
        self._workers: dict[Connection, _Worker] = {}
        self._started = 0
        self._deaths = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if not session.items or session.testsfailed or session.config.option.collectonly:
            return None  # pytest says what there is to say
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"{threads} threads run after the collection, and would not be in the workers"
        self._session = session
        self._schedule = Schedule(item.path for item in session.items)
        try:
            for _ in range(min(self._config.option.workers, len(session.items))):
                self._start()
            while self._workers:
                for connection in wait([*self._workers]):
                    self._hear(self._workers[connection])  # pyright: ignore[reportArgumentType]
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
        finally:
            self._end()
        return True

    def _start(self) -> None:
        """Fork a worker, and give it its first test."""
        number, self._started = self._started, self._started + 1
        place = self._config._tmp_path_factory.getbasetemp() / f"worker{number}"
        ours, theirs = Pipe()
        for stream in (self._config.get_terminal_writer(), sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            for one in (ours, *self._workers):
                one.close()
            _run(self._session, theirs, place)
        theirs.close()
        worker = self._workers[ours] = _Worker(number, pid, ours)
        self._hand_out(worker)

    def _hand_out(self, worker: _Worker) -> None:
        taken = self._schedule.take(worker.number)
        worker.test = taken[0] if taken else None
        with suppress(OSError):  # it has died, which shows when it is heard
            worker.connection.send(taken)

    def _hear(self, worker: _Worker) -> None:
        hook = self._config.hook
        try:
            what, *told = worker.connection.recv()
        except (EOFError, OSError):
            self._lost(worker)
            return
        match what:
            case "ran":
                assert worker.test is not None
                item, (reports, warned, stop) = self._session.items[worker.test], told
                hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
                self._pass_on(reports, warned)
                hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
                if stop:
                    self._session.shouldstop = stop
                self._hand_out(worker)
            case "ended":
                self._forget(worker)
                self._pass_on(*told)
            case "interrupted":
                raise KeyboardInterrupt
            case "exit":
                pytest.exit(*told)
            case _:
                raise RuntimeError(f"worker {worker.number} has failed:\n{told[0]}")

    def _pass_on(self, reports: Sequence[dict[str, Any]], warned: Sequence[Any]) -> None:
        hook = self._config.hook
        for category, words, file, line, rest in warned:
            message = warnings.WarningMessage(words, category, file, line)
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **rest})
        for data in reports:
            report = hook.pytest_report_from_serializable(config=self._config, data=data)
            hook.pytest_runtest_logreport(report=report)

    def _lost(self, worker: _Worker) -> None:
        """Report the test that a worker died in, and have another run the rest."""
        code = self._forget(worker)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        if worker.test is None:
            raise RuntimeError(f"worker {worker.number} has ended {how} after its last test")
        item: Any = self._session.items[worker.test]
        words = f"worker {worker.number} has ended {how} while it ran {item.nodeid}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")
        self._config.hook.pytest_runtest_logreport(report=report)
        self._schedule.give_back(worker.number)
        self._deaths += 1
        if self._deaths == MOST_DEATHS:
            self._session.shouldstop = f"{MOST_DEATHS} workers have died"
        elif not self._session.shouldfail:
            self._start()

    def _forget(self, worker: _Worker) -> int:
        """Wait for the end of a worker: its exit code."""
        del self._workers[worker.connection]
        worker.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])

    def _end(self) -> None:
        """End the workers that still run: after their test, or in it if that takes long, or at once."""
        workers = list(self._workers.values())
        try:
            for number in (None, signal.SIGINT):
                for worker in workers:
                    if number is None:
                        worker.connection.close()
                    elif not worker.ends(0):
                        os.kill(worker.pid, number)
                end = time.monotonic() + PATIENCE_S
                for worker in workers:
                    worker.ends(max(0.0, end - time.monotonic()))
        finally:
            for worker in workers:
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
            self._workers.clear()


class _Reports:
    """The plugin of a worker: collects what pytest says of a test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reports: list[dict[str, Any]] = []
        self._warnings: list[Any] = []

    def take(self) -> tuple[list[dict[str, Any]], list[Any]]:
        """What was collected since the last time."""
        taken, self._reports, self._warnings = (self._reports, self._warnings), [], []
        return taken

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        one, rest = warning_message, {"when": when, "nodeid": nodeid, "location": location}
        self._warnings.append((one.category, str(one.message), one.filename, one.lineno, rest))


class _Later:
    """Stands for a test of another module: what tests of several modules share is kept."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[pytest.Session]:
        return [self._session]


class _Terminal:
    """Stands for pytest's reporter in a worker: what ends a test that ran out of time writes to the terminal."""

    def __init__(self, reporter: Any) -> None:
        self._tw = reporter._tw


def _run(session: pytest.Session, connection: Connection, place: Path) -> NoReturn:
    """Be a worker: run the tests that come, until there is none, and end."""
    try:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGINT)
        how = _run_tests(session, connection, _settle(session.config, place))
        with suppress(OSError):  # nobody listens any more
            connection.send(how)
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    finally:
        os._exit(0)  # without taking apart all that was loaded, as an interpreter does


def _settle(config: Any, place: Path) -> _Reports:
    """Have what pytest made for the process that this was forked off made for this process."""
    plugins = config.pluginmanager
    capture = plugins.get_plugin("capturemanager")
    capture.suspend_global_capture()
    for stream in (capture._global_capturing.out, capture._global_capturing.err):
        # The file with what was captured is the same in all of them. The object stays: some modules have kept it.
        if isinstance(stream, FDCapture):
            with TemporaryFile() as fresh:
                os.dup2(fresh.fileno(), stream.tmpfile.fileno(), inheritable=False)
    place.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = place
    for name in ("workers", "terminalprogress"):
        plugins.unregister(name=name)
    plugins.register(_Terminal(plugins.unregister(name="terminalreporter")), "terminalreporter")
    reports = _Reports(config)
    plugins.register(reports)
    reports.take()  # those of the collection
    return reports


def _run_tests(session: pytest.Session, connection: Connection, reports: _Reports) -> tuple[object, ...]:
    """Run the tests that come, until there is none: how that ended."""
    last = None
    try:
        while (taken := _next(connection)) is not None:
            last, after = session.items[taken[0]], taken[1]
            later: Any = _Later(session) if after is None else session.items[after]
            session.config.hook.pytest_runtest_protocol(item=last, nextitem=later)
            connection.send(("ran", *reports.take(), session.shouldstop))
            if session.shouldfail or session.shouldstop:
                break
        if last is not None:
            call = pytest.CallInfo[None].from_call(lambda: _end_session(session), "teardown", reraise=_PASSED_ON)
            if call.excinfo is not None:
                report = session.config.hook.pytest_runtest_makereport(item=last, call=call)
                reports.pytest_runtest_logreport(report)
    except ConnectionError:
        """Nobody wants to know any more."""
    except KeyboardInterrupt:
        return ("interrupted",)
    except pytest.exit.Exception as error:
        return ("exit", error.msg, error.returncode)
    except BaseException:  # noqa: BLE001 - the process that started this one raises it
        return ("failed", traceback.format_exc())
    finally:
        with suppress(Exception):
            _end_session(session)
    return ("ended", *reports.take())


def _end_session(session: pytest.Session) -> None:
    """End what all tests share. What is printed meanwhile is nobody's, and is dropped."""
    capture: Any = session.config.pluginmanager.get_plugin("capturemanager")
    capture.resume_global_capture()
    try:
        session._setupstate.teardown_exact(None)  # pyright: ignore[reportPrivateUsage]
    finally:
        capture.suspend_global_capture()


def _next(connection: Connection) -> tuple[int, int | None] | None:
    """The next test and the one after it, if that is known; None if there is none, or nobody any more who knows."""
    try:
        return connection.recv()
    except EOFError:
        return None
