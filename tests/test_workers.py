"""`-n`: the tests of a run in several processes, which must end and be reported as those of one process are."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.children import gone
from tests.workers import MOST_DEATHS, Schedule

ROOT = Path(__file__).parents[1]
CONFTEST = """
import os
from pathlib import Path
import pytest
from tests import workers

PLACE = Path(__file__).parent
COLLECTS = os.getpid()

def note(word):
    with open(PLACE / "notes", "a") as file:
        file.write(f"{word} {os.getpid()}\\n")

def pytest_addoption(parser):
    workers.add_option(parser)

def pytest_configure(config):
    workers.configure(config)

def pytest_runtest_logreport(report):
    if report.failed and os.getpid() == COLLECTS:
        note("heard-of-a-failure")

@pytest.fixture(scope="session", autouse=True)
def whole_session(tmp_path_factory):
    note("session")
    tmp_path_factory.mktemp("session")
    yield
    os.write(2, b"said by nobody")
    note("end-of-session")

@pytest.fixture(scope="module")
def shared(request):
    note(request.module.__name__)
"""
HEAD = """
import atexit, os, pytest, signal, sys, threading, time, warnings
from conftest import PLACE, note
"""


class Project:
    """A directory with tests in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "pytest.ini").write_text("[pytest]\n")
        (path / "conftest.py").write_text(CONFTEST)

    def write(self, **modules: str) -> None:
        for name, source in modules.items():
            (self.path / f"{name}.py").write_text(HEAD + textwrap.dedent(source))

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Run pytest, in a process group of its own."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--disable-plugin-autoload",
            "-p",
            "no:cacheprovider",
            "-q",
            "--basetemp=base",
            *words,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("PYTEST_ADDOPTS", None)
        return subprocess.Popen(
            command, cwd=self.path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def run(self, *words: str) -> tuple[int, str]:
        """Run pytest: its exit code, and what it said."""
        with self.start(*words) as process:
            said = process.communicate(timeout=150)[0]
            return process.returncode, said

    def notes(self) -> list[tuple[str, int]]:
        """What tests and fixtures noted, and in which process."""
        lines = (self.path / "notes").read_text().splitlines()
        return [(word, int(pid)) for word, pid in (line.split() for line in lines)]

    def noted(self, word: str) -> list[int]:
        return [pid for found, pid in self.notes() if found == word]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_tests_are_reported_as_those_of_one_process(project: Project) -> None:
    project.write(
        test_one="""
        def test_passes(shared): note("test")
        def test_fails(shared):
            note("test")
            print("printed before")
            assert 1 + 1 == 3
        @pytest.mark.skip(reason="left out")
        def test_skipped(shared): ...
        @pytest.mark.xfail
        def test_expected(shared): assert 0
        """,
        test_two="""
        @pytest.fixture
        def broken():
            yield
            raise OSError("torn down")
        @pytest.mark.parametrize("number", range(8))
        def test_many(shared, tmp_path, number):
            note("test")
            warnings.warn(f"warned of {number}")
        def test_teardown(broken): note("test")
        """,
    )
    words = ("--durations=2", "--durations-min=0", "--junit-xml=report.xml")
    code, said = project.run("-n", "2", *words)
    pids = set(project.noted("test"))
    assert code == pytest.ExitCode.TESTS_FAILED
    assert len(project.noted("test")) == 11
    assert len(pids) == 2
    # What several tests share is made once in each process that runs some of them.
    assert sorted(project.noted("session")) == sorted(project.noted("end-of-session")) == sorted(pids)
    assert len(project.noted("test_one")) == len(set(project.noted("test_one")))
    for words_of_report in (
        "assert (1 + 1) == 3", "printed before", "OSError: torn down", "ERROR test_two.py::test_teardown - ",
        "FAILED test_one.py::test_fails - ", "warned of 7", "slowest 2 durations",
        "1 failed, 10 passed, 1 skipped, 1 xfailed, 8 warnings, 1 error",
    ):  # fmt: skip
        assert said.count(words_of_report) >= 1, said
    reported = cases(project)
    assert "said by nobody" not in said
    alone_code, alone = project.run("-n", "0", *words)
    assert alone_code == code
    assert counts(alone) == counts(said)
    assert cases(project) == reported


def counts(said: str) -> str:
    """The last line, without the time."""
    return said.splitlines()[-1].rpartition(" in ")[0]


def cases(project: Project) -> list[tuple[str | None, str | None]]:
    """The tests of which the file for other programs tells."""
    found = ElementTree.parse(project.path / "report.xml").iter("testcase")
    return sorted((one.get("classname"), one.get("name")) for one in found)


def test_a_worker_that_dies_fails_its_test_and_another_goes_on(project: Project) -> None:
    project.write(
        test_one="""
        def test_before(): note("before")
        def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
        def test_after(shared): note("after")
        """,
        test_two="""
        def test_leaves(): os._exit(3)
        def test_last(): note("last")
        """,
    )
    code, said = project.run("-n", "2")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert re.search(r"worker \d has ended by SIGKILL while it ran test_one.py::test_dies", said)
    assert re.search(r"worker \d has ended with exit code 3 while it ran test_two.py::test_leaves", said)
    assert counts(said) == "2 failed, 3 passed"
    assert [len(project.noted(word)) for word in ("before", "after", "last")] == [1, 1, 1]


def test_a_run_in_which_every_test_kills_its_worker_ends(project: Project) -> None:
    project.write(
        test_one="""
        @pytest.mark.parametrize("number", range(100))
        def test_dies(number): os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    code, said = project.run("-n", "2")
    assert code == pytest.ExitCode.INTERRUPTED
    assert f"{MOST_DEATHS} workers have died" in said
    assert f"{MOST_DEATHS} failed" in said


FAILS_FIRST = """
def test_fails(shared): assert 0
@pytest.mark.parametrize("number", range(100))
def test_many(shared, number): note("test")
"""


def test_after_as_many_failures_as_were_allowed_no_other_test_begins(project: Project) -> None:
    project.write(test_one=FAILS_FIRST, test_two="""
        def test_waits():
            while "heard-of-a-failure" not in (PLACE / "notes").read_text(): time.sleep(0.01)
        @pytest.mark.parametrize("number", range(100))
        def test_many(number): note("test")
    """)  # fmt: skip
    code, said = project.run("-n", "2", "-x")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in said
    # Of the second worker, at most the test that it had and the one behind it.
    assert len(project.noted("test")) <= 2
    assert len(project.noted("end-of-session")) == len(project.noted("session")) == 2


WAITS = """
def test_waits():
    note("waits")
    threading.Event().wait(100)
"""


@pytest.fixture
def waiting(project: Project) -> Iterator[subprocess.Popen[str]]:
    """A run whose workers are both in the middle of a test."""
    project.write(test_one=WAITS, test_two=WAITS)
    with project.start("-n", "2") as process:
        while not (project.path / "notes").exists() or len(project.noted("waits")) < 2:
            assert process.poll() is None, process.communicate()[0]
        yield process


def test_ctrl_c_ends_all_processes_and_their_fixtures(project: Project, waiting: subprocess.Popen[str]) -> None:
    os.killpg(waiting.pid, signal.SIGINT)
    said = waiting.communicate(timeout=100)[0]
    assert waiting.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in said
    assert sorted(project.noted("end-of-session")) == sorted(project.noted("waits"))
    assert all(gone(pid) for pid in project.noted("waits"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_process_that_started_them(
    project: Project, waiting: subprocess.Popen[str], number: signal.Signals
) -> None:
    waiting.send_signal(number)
    assert waiting.wait(100) == -number
    assert all(gone(pid, 100) for pid in project.noted("waits"))
    assert sorted(project.noted("end-of-session")) == sorted(project.noted("waits"))


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("def test_exits(): pytest.exit('no more', returncode=7)", 7, "Exit: no more"),
        ("def test_interrupts(): raise KeyboardInterrupt", pytest.ExitCode.INTERRUPTED, "KeyboardInterrupt"),
        ("def test_stops(request): request.session.shouldstop = 'enough'", pytest.ExitCode.INTERRUPTED, "enough"),
        ("def pytest_of_nothing(): ...", pytest.ExitCode.NO_TESTS_COLLECTED, "no tests ran"),
        ("import nothing_of_this_name", pytest.ExitCode.INTERRUPTED, "1 error"),
        ("thread = threading.Thread(target=time.sleep, args=[1000], daemon=True); thread.start()\ndef test_one(): ...",
         pytest.ExitCode.INTERNAL_ERROR, "2 threads run after the collection"),
        ("def test_one(): atexit.register(note, 'at exit')", pytest.ExitCode.OK, "1 passed"),
        ("def test_one(tmp_path): assert 'worker0' in str(tmp_path)", pytest.ExitCode.OK, "1 passed"),
    ],
)  # fmt: skip
def test_a_run_of_one_worker_ends_as_one_without_does(project: Project, source: str, code: int, words: str) -> None:
    project.write(test_one=source)
    found, said = project.run("-n", "1")
    assert found == code, said
    assert words in said


def test_whole_modules_are_handed_out_and_in_the_end_halves() -> None:
    schedule = Schedule("aaaabbbbbbbbcc")
    assert [schedule.take(0), schedule.take(1), schedule.take(2)] == [(0, 1), (4, 5), (12, 13)]
    assert [schedule.take(2), schedule.take(0)] == [(13, None), (1, 2)]
    # No module is left: half of what the second worker has before it, without the test that it gets next in any case.
    assert [schedule.take(2) for _ in range(3)] == [(9, 10), (10, 11), (11, None)]
    assert [schedule.take(2), schedule.take(2)] == [(7, 8), (8, None)]
    assert [schedule.take(1) for _ in range(2)] == [(5, 6), (6, None)]
    assert [schedule.take(1), schedule.take(2)] == [(3, None), None]
    assert [schedule.take(0), schedule.take(0)] == [(2, None), None]


def test_what_a_dead_worker_had_before_it_comes_first() -> None:
    schedule = Schedule("aaabbb")
    assert schedule.take(0) == (0, 1)
    schedule.give_back(0)
    assert [schedule.take(1) for _ in range(6)] == [(1, 2), (2, None), (3, 4), (4, 5), (5, None), None]
