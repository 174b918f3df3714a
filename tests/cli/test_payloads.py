"""`interlock calls payload`: what was too large to be shown with its call, and single files that calls left."""

from __future__ import annotations

import base64
import hashlib
import os
import pty
import subprocess
from pathlib import Path

import orjson
import pytest

from tests import warm
from tests.support.cli import INTERLOCK, Cli
from tests.support.programs import TEXT, manifest, written

LARGE = '''
from typing import Annotated

from interlock import Field, tool

Text = Annotated[str, Field(description="any text", examples=["hello"])]


@tool(version="1.0.0", mutation_class="read_only", namespace="own", max_inline_chars=100)
def long(text: Text) -> str:
    """Say it fifty times."""
    return text * 50
'''
WORD = "ä\u009b\u202e!"  # with what would steer a terminal


@pytest.fixture
def large(fresh: Cli) -> Cli:
    """A home with a tool whose results are kept."""
    (fresh.path / "large.py").write_text(LARGE)
    assert fresh("tools", "add", "large.py").code == 0
    return fresh


def kept(cli: Cli) -> str:
    result = cli.call("own.long", {"text": WORD})
    return str(result["invocation_id"])


def raw(cli: Cli, *words: str) -> bytes:
    return warm.run(words, cli.environment, cli.path)[1]


def test_a_large_result_is_printed_byte_for_byte_by_its_reference_or_its_call(large: Cli) -> None:
    said = large("call", "own.long", orjson.dumps({"text": WORD}).decode()).out
    ref = next(word for word in said.split() if word.startswith("payload:"))
    assert f"interlock calls payload {ref}" in said
    call = ref.removeprefix("payload:")
    body = orjson.dumps(WORD * 50)
    assert raw(large, "calls", "payload", ref) == body
    told = large.ask("calls", "payload", call[:22])
    assert told == {"payload_ref": ref, "size": len(body), "sha256": hashlib.sha256(body).hexdigest(),
                    "content": WORD * 50}  # fmt: skip


def test_a_file_is_written_and_none_that_is_there_is_written_over(large: Cli) -> None:
    call, body = kept(large), orjson.dumps(WORD * 50)
    told = large.ask("calls", "payload", call, "--out", "all.json")
    assert (told["file"], told["size"]) == ("all.json", len(body))
    assert "content" not in told
    there = large.path / "all.json"
    assert there.read_bytes() == body
    there.write_bytes(b"mine")
    (large.path / "link").symlink_to("elsewhere")
    for name in ("all.json", "link"):
        again = large("calls", "payload", call, "--out", name)
        assert again.code == 1
        assert f"`{name}` is there already" in again.err
    assert there.read_bytes() == b"mine"
    assert not (large.path / "elsewhere").exists()
    lost = large("calls", "payload", call, "--out", "no/such/place")
    assert (lost.code, "E3410" in lost.err) == (1, True)


def test_nobody_else_and_nothing_else_is_read(large: Cli) -> None:
    call = kept(large)
    token = large("token", "issue", "--agent", "bot", "--for", "alice", "--tool", "own.*").out.strip()
    for words in ((call, "--token", token), (f"payload:{call}.1",), (f"undo:{call}",), ("payload:nothing",)):
        refused = large("calls", "payload", *words)
        assert (refused.code, refused.out) == (1, "")
        assert "E3702" in refused.err
    small = large.call("own.long", {"text": "x"})["invocation_id"]
    assert "has no result that was kept" in large("calls", "payload", small).err


def test_whoever_is_of_another_tenant_does_not_learn_which_calls_there_are(large: Cli) -> None:
    did = large.ask("identities", "add", "--name", "ann", "--kind", "human", "--tenant", "acme")["did"]
    token = large.ask("token", "issue", "--person", did)["token"]
    call = large.call("own.long", {"text": "x"})["invocation_id"]
    for command, *more in (("payload",), ("save", "there"), ("checkpoints",), ("undo", "--key", "k")):
        refused = large("calls", command, call[:22], *more, "--token", token)
        assert refused.code == 1
        assert "E3702" in refused.err
        assert call not in refused.err


def on_terminal(cli: Cli, *words: str) -> tuple[int, bytes]:
    ours, theirs = pty.openpty()
    child = subprocess.Popen([*INTERLOCK, *words], env=cli.environment, cwd=cli.path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while piece := _read(ours):
        shown += piece
    os.close(ours)
    return child.wait(30), shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


def test_on_a_terminal_nothing_is_drawn_by_what_is_shown(large: Cli) -> None:
    code, shown = on_terminal(large, "calls", "payload", kept(large))
    assert code == 0
    assert "ä\\x9b\\x202e!" in shown.decode()
    assert "\u009b" not in shown.decode()


def test_a_file_that_a_call_left_is_read_whole_whatever_is_in_it(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    script = r"printf '\377\000\033[2J' > out/raw; echo 1"
    leave = manifest(
        "leave", ["sh", "-c", script, "sh", "{text}"],
        {"type": "integer"}, parameters={"text": TEXT}, sandbox={"artifacts": 1}, execution={"parse": "json"},
    )  # fmt: skip
    written(tmp_path / "leave.json", leave)
    assert cli("tools", "add", "leave.json").code == 0
    ref = f"payload:{cli.call('prog.leave', {'text': 'x'})['invocation_id']}.1"
    body = b"\xff\x00\x1b[2J"
    assert raw(cli, "calls", "payload", ref) == body
    assert base64.b64decode(cli.ask("calls", "payload", ref)["content_base64"]) == body
    code, shown = on_terminal(cli, "calls", "payload", ref)
    assert code == 2
    assert b"--out" in shown
    assert b"\x1b[2J" not in shown
