"""`python -m bench.doors_profile NAME [CONNECTIONS]`: where our server spends its time when one thing is asked of it.

NAME is a row of `./dev bench doors`, without `Interlock`: `REST, read`, `gRPC, read`, `REST, HTTP upstream`, `plain
def`, `write with a key` and so on.
The server runs under cProfile while it is asked. Times are CPU time of the loop's thread, in µs for each request;
cProfile makes calls of Python functions dearer than they are, so that figures compare with one another, not with those
of the benchmark.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench import doors
from bench.doors_servers import measure, start_load

SHOWN = 40
SECONDS = 3.0
_FILE = "BENCH_PROFILE"


def serve() -> None:
    """`interlock`, with a profiler that one signal starts and another has write down what it saw."""
    from interlock.cli import main

    profiler = cProfile.Profile(time.thread_time)
    path = Path(os.environ[_FILE])

    def begin(*_: Any) -> None:
        profiler.enable()

    def end(*_: Any) -> None:
        profiler.disable()
        profiler.dump_stats(path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    sys.argv = ["interlock", *sys.argv[2:]]
    main()


def profile(name: str, connections: int) -> None:
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="interlock-bench-")))
        os.environ[_FILE] = str(place / "profile")
        load = stack.enter_context(start_load())
        program = (sys.executable, "-m", "bench.doors_profile", "--serve")
        asked = {one.removeprefix("Interlock "): one for one in (*doors.OURS, *doors.OUR_ORDINARY)}
        if name not in asked:
            raise SystemExit(f"one of: {', '.join(asked)}")
        if asked[name] in doors.OURS:
            (subject,) = doors.our_callers(stack, place, doors.start_backend(stack), (asked[name],), program)
        else:
            behind = doors.start_upstreams(stack, (asked[name],))
            (subject,) = doors.ordinary_callers(stack, place, behind, (asked[name],), program)
        measure(load, subject, connections, SECONDS / 4)
        os.kill(subject.server.pid, signal.SIGUSR1)
        laps = measure(load, subject, connections, SECONDS)["laps"]
        os.kill(subject.server.pid, signal.SIGUSR2)
        while not (place / "profile").exists():
            time.sleep(0.05)
        _show(pstats.Stats(str(place / "profile")), laps)


def _show(stats: Any, laps: int) -> None:
    rows = [
        (own / laps * 1e6, total / laps * 1e6, calls / laps, f"{Path(file).name}:{line} {function}")
        for (file, line, function), (_, calls, own, total, _) in stats.stats.items()
    ]
    for column, title in ((0, "by own time"), (1, "by total time")):
        print(f"\n{title:>11} {'total':>9} {'calls':>8}")
        for own, total, calls, where in sorted(rows, key=itemgetter(column), reverse=True)[:SHOWN]:
            print(f"{own:11.1f} {total:9.1f} {calls:8.2f}  {where}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve()
    else:
        profile(" ".join(sys.argv[1:2]), int((*sys.argv[2:], "128")[0]))
