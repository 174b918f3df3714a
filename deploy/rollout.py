#!/usr/bin/env python3
"""Update servers one by one, watch each, and go back if more than 1 % of its calls fail.

    deploy/rollout.py --update 'ssh "$HOST" deploy/install 1.3.0' --rollback 'ssh "$HOST" deploy/install 1.2.0' \\
        https://a.internal:8480 https://b.internal:8480 https://c.internal:8480

For each server: run the command --update and wait until /ready answers 200. Then watch /ready and the calls that
/metrics counts for --watch seconds, and longer until at least --calls calls have ended. Only then comes the next one.
If a command fails, if a server does not become ready or stops being so, if too few calls come to judge it, or if more
than --most-errors percent of the calls failed, were blocked or ran out of time, the command --rollback is run for every
server that was updated, the last one first, and the exit code is 1.

The commands are run by a shell with NODE (the address of the server), HOST (its host name) and LEFT (how many servers
still have the old version after this one). --rollback is also run where --update has failed halfway, and must not mind.
Any Python 3.11 runs this; nothing else is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

ERRORS = ("failed", "timed_out", "blocked")
COUNT = re.compile(r'^tool_invocation_count(?:_total)?\{[^}]*\bstatus="([a-z_]+)"[^}]*\} ([0-9.e+]+)', re.MULTILINE)
# A server may fail to answer for a moment. So many times in a row is not a moment.
MISSES = 3


class RolloutError(Exception):
    """The rollout cannot go on."""


class Calls(NamedTuple):
    """Calls that have ended since a server was started."""

    ended: float
    failed: float


class Node:
    """One server, asked over HTTP."""

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s

    def ready(self) -> bool:
        try:
            self._get("/ready")
        except OSError:
            return False
        return True

    def calls(self) -> Calls | None:
        """The calls that its metrics count; None if it does not answer."""
        try:
            text = self._get("/metrics")
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                words = f"{self.url}/metrics needs a token with the scope metrics:read: --token-file"
                raise RolloutError(words) from None
            return None
        except OSError:
            return None
        counted = [(status, float(number)) for status, number in COUNT.findall(text)]
        return Calls(sum(n for _, n in counted), sum(n for status, n in counted if status in ERRORS))

    def _get(self, path: str) -> str:
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
            return answer.read(64 << 20).decode()


def run(command: str, node: Node, left: int) -> None:
    """Run a command of the user for a server."""
    environment = {**os.environ, "NODE": node.url, "HOST": urlsplit(node.url).hostname or "", "LEFT": str(left)}
    code = subprocess.run(command, shell=True, env=environment, check=False).returncode
    if code:
        raise RolloutError(f"the command for {node.url} ended with {code}")


def await_ready(node: Node, within_s: float, every_s: float) -> None:
    until = time.monotonic() + within_s
    while not node.ready():
        if time.monotonic() > until:
            raise RolloutError(f"{node.url} was not ready within {within_s:g} s")
        time.sleep(every_s)


def watch(node: Node, given: argparse.Namespace) -> Calls:
    """Watch a server that was just updated. Raises when it is worse than allowed."""
    began, misses = time.monotonic(), 0
    seen = Calls(0, 0)  # since the new version was started: a server counts from zero
    while True:
        found = node.calls() if node.ready() else None
        misses = 0 if found else misses + 1
        if misses >= MISSES:
            raise RolloutError(f"{node.url} does not answer, or is not ready any more")
        seen = found or seen
        if seen.ended >= given.calls and seen.failed > seen.ended * given.most_errors / 100:
            words = f"{node.url}: {seen.failed:g} of {seen.ended:g} calls failed, over {given.most_errors:g} %"
            raise RolloutError(words)
        passed = time.monotonic() - began
        if seen.ended >= given.calls and passed >= given.watch:
            return seen
        if passed >= max(given.watch, given.patience):
            raise RolloutError(f"{node.url}: {seen.ended:g} calls in {passed:.0f} s are too few to judge; see --calls")
        time.sleep(given.every)


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("nodes", nargs="+", metavar="URL", help="the servers, in the order in which they are updated")
    add("--update", required=True, metavar="COMMAND", help="puts the new version on a server and starts it again")
    add("--rollback", required=True, metavar="COMMAND", help="puts the old version back and starts it again")
    add("--watch", type=float, default=300, metavar="S", help="how long each server is watched (300)")
    add("--calls", type=int, default=200, metavar="N", help="the fewest calls by which a server is judged (200)")
    add("--most-errors", type=float, default=1.0, metavar="PERCENT", help="the most calls that may fail (1)")
    add("--patience", type=float, default=3600, metavar="S", help="how long to wait for enough calls (3600)")
    add("--ready-within", type=float, default=300, metavar="S", help="how long a server may take to be ready (300)")
    add("--every", type=float, default=2, metavar="S", help="how often a server is asked (2)")
    add("--token-file", type=Path, metavar="FILE", help="a token with the scope metrics:read")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    given = arguments(words)
    token = None if given.token_file is None else given.token_file.read_text().strip()
    nodes = [Node(url, token, timeout_s=10) for url in given.nodes]
    updated: list[Node] = []
    try:
        for node in nodes:
            updated.append(node)
            run(given.update, node, len(nodes) - len(updated))
            await_ready(node, given.ready_within, given.every)
            seen = watch(node, given)
            print(f"{node.url} updated: {seen.failed:g} of {seen.ended:g} calls failed", flush=True)
    except (RolloutError, KeyboardInterrupt) as why:
        print(f"rolling back: {why or 'interrupted'}", file=sys.stderr, flush=True)
        return roll_back(updated, len(nodes), given)
    return 0


def roll_back(updated: list[Node], count: int, given: argparse.Namespace) -> int:
    """Put the old version back on each server; 1, or 2 if one of them needs help."""
    code = 1
    for done, node in enumerate(reversed(updated)):
        try:
            run(given.rollback, node, count - len(updated) + done + 1)
            await_ready(node, given.ready_within, given.every)
            print(f"{node.url} is back", flush=True)
        except RolloutError as why:
            print(f"not rolled back: {why}", file=sys.stderr, flush=True)
            code = 2
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
