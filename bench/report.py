"""Tables for people, and the same tables kept in RESULTS.md with where they come from."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

import interlock

RESULTS = Path(__file__).parent / "RESULTS.md"
PEERS = ("langchain-core", "pydantic-ai-slim", "fastmcp", "mcp", "procrastinate", "dbos")
PASS, FAIL = "pass", "FAIL"
_STYLES = {PASS: "green", FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class Table:
    """Figures under a title. Without rows, the note says why there are none."""

    title: str
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    note: str = ""

    def show(self, console: Console) -> None:
        console.print(f"\n[bold]{self.title}[/bold]")
        if self.rows:
            table = RichTable(box=box.SIMPLE_HEAD)
            for index, column in enumerate(self.columns):
                table.add_column(column, justify="right" if index else "left", no_wrap=True)
            for row in self.rows:
                table.add_row(*map(_styled, row))
            console.print(table)
        if self.note:
            console.print(f"[dim]{self.note}[/dim]")

    def markdown(self) -> str:
        lines = [f"### {self.title}", ""]
        if self.rows:
            lines.append(f"| {' | '.join(self.columns)} |")
            lines.append(f"|---|{'---:|' * (len(self.columns) - 1)}")
            lines.extend(f"| {' | '.join(row)} |" for row in self.rows)
            lines.append("")
        if self.note:
            lines.extend([self.note, ""])
        return "\n".join(lines)


def verdict(holds: bool) -> str:
    return PASS if holds else FAIL


def heading() -> str:
    """When, where and on what the figures were taken, without naming the machine."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{now} · {machine}, {python} · commit {_commit()}"


def peers() -> str:
    return "Peers: " + ", ".join(f"{name} {_version(name)}" for name in PEERS)


def save(headed: str, tables: Sequence[Table]) -> None:
    """Append a section to RESULTS.md, under the heading taken when the run began."""
    if not RESULTS.exists():
        RESULTS.write_text("# Results\n\nWritten by `./dev bench --save`. Only ratios within one run hold.\n")
    with RESULTS.open("a") as file:
        file.write(f"\n## {headed}\n\n{peers()}.\n\n" + "\n".join(table.markdown() for table in tables))


def _styled(cell: str) -> str:
    style = _STYLES.get(cell)
    return f"[{style}]{cell}[/{style}]" if style else cell


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _commit() -> str:
    if not Path(interlock.__file__).is_relative_to(RESULTS.parent.parent):
        return "unknown: interlock was not imported from this repository"
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", ":/src")
    return f"{commit or 'unknown'}{' with uncommitted changes' if changed else ''}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()
