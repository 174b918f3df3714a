"""`python -m bench [NAME] [FOLDER] [OPTIONS]`: measure, print, and keep what is to be kept."""

from __future__ import annotations

import argparse
import asyncio
import importlib
from pathlib import Path

from rich.console import Console

from bench import report
from bench.measure import Plan
from bench.report import Table

SECTIONS = {
    "calls": "CPU per call beside the peers, with the goals",
    "parts": "where the time of a call goes",
    "search": "how well and how fast tools are found, beside other ways; takes a folder of labelled sets",
    "catalog": "cost per call with few and many registered tools",
    "journal": "cost per durable call on a short and a long journal",
    "authority": "what tokens and policies add, decisions over many rules, issue and verify rates",
    "doors": "the doors under load beside other servers, with the goals",
    "scale": "durable calls per second on SQLite and on PostgreSQL with one node and two, beside job queues",
    "soak": "memory of one server over a hundred thousand requests of every kind",
    "siege": "how long an honest caller waits beside a hostile one of each kind",
    "sandbox": "an isolated call beside a bare interpreter's start",
    "verify": "rows/s of audit verify",
    "startup": "CPU of starting the command line",
}


def main() -> None:
    arguments = _parser().parse_args()
    # Wide enough for every table, also where the output is a file.
    console = Console(width=max(Console().width, 120), highlight=False)
    headed = report.heading()
    console.print(f"{headed}\n{report.peers()}")
    chosen = {"rows": arguments.row, "folder": arguments.folder, "against": arguments.against}
    plan = Plan.of(quick=arguments.quick, **chosen)
    tables: list[Table] = []
    for name in SECTIONS if arguments.name == "all" else (arguments.name,):
        # Each section imports only what it measures, and says on what event loop where it matters.
        section = importlib.import_module(f"bench.{name}")
        with asyncio.Runner(loop_factory=getattr(section, "loop_factory", None)) as runner:
            found: list[Table] = runner.run(section.run(plan))
        for table in found:
            table.show(console)
        tables.extend(found)
    if arguments.save:
        report.save(headed, tables)


def _parser() -> argparse.ArgumentParser:
    listing = "; ".join(f"{name}: {words}" for name, words in SECTIONS.items())
    parser = argparse.ArgumentParser(prog="bench", description=f"Measure Interlock. {listing}.")
    parser.add_argument("name", nargs="?", default="all", choices=(*SECTIONS, "all"))
    parser.add_argument("folder", nargs="?", type=Path, help="`search`: a folder of sets as in bench/sets")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, rougher figures")
    parser.add_argument("--row", action="append", default=[], help="`doors`: only this row; may be repeated")
    parser.add_argument("--against", default="", help="`scale`: compare SQLite with that of this commit")
    parser.add_argument("--save", action="store_true", help="append the figures to bench/RESULTS.md")
    return parser


if __name__ == "__main__":
    main()
