"""`startup`: CPU of a child process from nothing to the answer of a command, beside what everybody pays."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.measure import Figure, Plan
from bench.report import Table, verdict

HELP = "interlock --help"
HELP_BELOW_MS = 300.0
COMMAND_BELOW_MS = 250.0
UPSTREAM = "notes"
# Commands of an ordinary day, on a data directory with the tools of the guided tour and an upstream. CALL is the id of
# a call.
DAILY: Mapping[str, Sequence[str]] = {
    "tools list": ("tools", "list"),
    "tools show": ("tools", "show", "demo.post"),
    "tools search": ("tools", "search", "balance of an account"),
    "tools select": ("tools", "select", "balance of an account"),
    "tools export": ("tools", "export", "--format", "anthropic"),
    "tools diff": ("tools", "diff", "demo.post", "1.2.0", "1.2.0"),
    "call": ("call", "demo.balance", '{"account": "cash"}'),
    "calls list": ("calls", "list"),
    "calls show": ("calls", "show", "CALL"),
    "calls trace": ("calls", "trace", "CALL"),
    "calls inputs": ("calls", "inputs", "CALL"),
    "audit explain": ("audit", "explain", "CALL"),
    "audit verify": ("audit", "verify"),
    "approvals list": ("approvals", "list"),
    "upstream list": ("upstream", "list"),
    "upstream show": ("upstream", "show", UPSTREAM),
    "token issue": ("token", "issue", "--agent", "bot"),
    "identities list": ("identities", "list"),
    "keys list": ("keys", "list"),
    "secrets list": ("secrets", "list"),
    "budgets": ("budgets",),
    "config show": ("config", "show"),
    "config check": ("config", "check"),
    "surface show": ("surface", "show"),
    "policy explain": ("policy", "explain", "me", "demo.post"),
    "migrate status": ("migrate", "status"),
    "health": ("health",),
    "doctor": ("doctor",),
}


async def run(plan: Plan) -> list[Table]:
    # Otherwise every run compiles all that it loads.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with TemporaryDirectory() as directory:
        return _tables(plan, Path(directory) / "home")


def _tables(plan: Plan, home: Path) -> list[Table]:
    python = sys.executable
    script = str(Path(python).parent / "interlock")
    commands: dict[str, Sequence[str]] = {
        "python -c pass": (python, "-c", "pass"),
        "import interlock": (python, "-c", "import interlock"),
        "interlock --version": (script, "--version"),
        HELP: (script, "--help"),
        "import langchain_core.tools": (python, "-c", "import langchain_core.tools"),
        "import mcp.server.mcpserver": (python, "-c", "import mcp.server.mcpserver"),
    }
    missing = "" if runs(commands[HELP]) else "interlock --help is left out: the command line does not start yet"
    if missing:
        del commands[HELP]
    elif runs((script, "--home", str(home), "tools", "add", "interlock.demo_tools")):
        add = ("upstream", "add", "mcp", UPSTREAM, "--", python, "-m", "interlock.demo_server")
        subprocess.run((script, "--home", str(home), *add), stdout=subprocess.DEVNULL, check=True)
        call = _call_of((script, "--home", str(home), "call", "demo.balance", '{"account": "cash"}', "--json"))
        for name, words in DAILY.items():
            said = [call if word == "CALL" else word for word in words]
            commands[f"interlock {name}"] = (script, "--home", str(home), *said)
    figures = measure(commands, plan.rounds)
    rows = [(name, f"{figure.us / 1e3:.0f}", *_goal(name, figure)) for name, figure in figures.items()]
    return [Table("Start-up", ("", "CPU ms (user + system)", "goal", ""), rows, missing)]


def _call_of(command: Sequence[str]) -> str:
    """Make a call, and return its id."""
    done = subprocess.run(command, capture_output=True, check=True)
    return str(json.loads(done.stdout)["invocation_id"])


def measure(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, Figure]:
    order = random.Random(1)
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for name in commands:
        child_cpu_us(commands[name])  # compiles what has no bytecode yet
    for _ in range(rounds):
        for name in order.sample(list(commands), len(commands)):
            samples[name].append(child_cpu_us(commands[name]))
    return {name: Figure.of(values) for name, values in samples.items()}


def child_cpu_us(command: Sequence[str]) -> float:
    """User and system time of one run."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"{command[-1]} ended with {child.returncode}")
    return (usage.ru_utime + usage.ru_stime) * 1e6


def runs(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _goal(name: str, figure: Figure) -> tuple[str, str]:
    if not name.startswith("interlock "):
        return "", ""
    below_ms = HELP_BELOW_MS if name == HELP else COMMAND_BELOW_MS
    return f"< {below_ms:.0f}", verdict(figure.us / 1e3 < below_ms)
