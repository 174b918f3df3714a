"""`interlock audit export`: written over nothing, signed to its end, and proven later with `audit verify --export`."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.audit.exported import line_of, verify_export
from interlock.audit.retention import purge
from interlock.core.clock import Clock
from interlock.settings import load_settings
from interlock.store.homes import home_at
from interlock.store.last_head import SignedHead
from interlock.store.signing import Signer
from tests.support.cli import Cli

Lines = list[bytes]


def exported(cli: Cli) -> Lines:
    """The lines of an export: some calls, and the record of the export itself."""
    cli.call("demo.post", {"account": "cash", "cents": 250}, "--key", "order-17")
    assert cli("audit", "export", "--out", "journal.jsonl").code == 0
    return (cli.path / "journal.jsonl").read_bytes().splitlines(keepends=True)


def key_of(cli: Cli) -> str:
    return (cli.home / "keys" / "journal.pub").read_text().strip()


def test_an_export_is_not_written_over_a_file_unless_one_says_so(cli: Cli) -> None:
    target = cli.path / "journal.jsonl"
    target.write_text("mine")
    refused = cli("audit", "export", "--out", "journal.jsonl")
    assert refused.code == 1
    assert "`journal.jsonl` is there already; nothing was written" in refused.err
    assert "--replace" in refused.err
    assert target.read_text() == "mine"
    assert cli("audit", "export", "--out", "journal.jsonl", "--replace").code == 0
    assert verify_export(target.read_bytes().splitlines(keepends=True)).intact
    (cli.path / "link").symlink_to("nowhere")
    assert cli("audit", "export", "--out", "link").code == 1
    assert not (cli.path / "nowhere").exists()


def export_by(cli: Cli, before: str) -> subprocess.CompletedProcess[bytes]:
    """The export of a process that does something first."""
    program = f"import os, sys\n{before}\nfrom interlock.cli import main\nmain()"
    words = [sys.executable, "-c", program, "audit", "export", "--out", "journal.jsonl"]
    return subprocess.run(words, env=cli.environment, cwd=cli.path, capture_output=True, check=False)


def test_what_others_have_put_beside_an_export_is_not_written_to(cli: Cli) -> None:
    (cli.path / "theirs").write_text("theirs")
    assert export_by(cli, "os.symlink('theirs', f'.journal.jsonl.{os.getpid()}')").returncode == 0
    assert (cli.path / "theirs").read_text() == "theirs"
    assert verify_export((cli.path / "journal.jsonl").read_bytes().splitlines(keepends=True)).intact
    assert (cli.path / "journal.jsonl").lstat().st_mode == 0o100600


def test_a_file_that_came_while_an_export_was_written_is_not_written_over(cli: Cli) -> None:
    begun = "def begun(event, args):\n  if event == 'open' and '.journal.jsonl.' in str(args[0]):"
    ended = export_by(cli, f"{begun} os.system('echo mine > journal.jsonl')\nsys.addaudithook(begun)")
    assert ended.returncode == 1
    assert b"E3411" in ended.stderr
    assert sorted(os.listdir(cli.path)) == ["home", "journal.jsonl"]
    assert (cli.path / "journal.jsonl").read_text() == "mine\n"


def test_an_export_can_be_proven_later_without_the_home(cli: Cli) -> None:
    lines = exported(cli)
    nowhere = Cli(cli.path, {"INTERLOCK_HOME": str(cli.path / "none")})
    ended = nowhere("audit", "verify", "--export", "journal.jsonl")
    assert ended.code == 0, ended.out + ended.err
    assert "intact" in ended.out
    assert "the key that the export itself names" in ended.out
    trusted = nowhere("audit", "verify", "--export", "journal.jsonl", "--public-key", key_of(cli))
    assert (trusted.code, "itself names" in trusted.out) == (0, False)
    assert nowhere("audit", "verify", "--export", "-", stdin=b"".join(lines).decode()).code == 0
    document = nowhere.ask("audit", "verify", "--export", "journal.jsonl")
    assert (document["intact"], document["records"]) == (True, len(lines))
    assert document["anchored_through"] == document["head"]["seq"] == len(lines)
    head = f"{document['head']['seq']}:{document['head']['hash']}"
    assert nowhere("audit", "verify", "--export", "journal.jsonl", "--known-head", head).code == 0
    later = nowhere("audit", "verify", "--export", "journal.jsonl", "--known-head", f"99:{'00' * 32}")
    assert (later.code, "the known head names the last" in later.out) == (1, True)
    assert nowhere("audit", "verify", "--export", "journal.jsonl", "--database-only").code == 2
    assert nowhere("audit", "verify", "--export", "absent.jsonl").code == 2
    assert not (cli.path / "none").exists()
    assert cli("audit", "verify").code == 0


def _changed(lines: Lines) -> Lines:
    return [line.replace(b"1250", b"9250") for line in lines]


def _removed(lines: Lines) -> Lines:
    return lines[:4] + lines[5:]


def _swapped(lines: Lines) -> Lines:
    return [*lines[:3], lines[4], lines[3], *lines[5:]]


def _beheaded(lines: Lines) -> Lines:
    return lines[2:]


def _cut(lines: Lines) -> Lines:
    """All lines up to the last record without a signature of its own. Which records these are depends on timing."""
    return lines[: max(seq for seq, line in enumerate(lines, 1) if not _is_signed(line))]


def _is_signed(line: bytes) -> bool:
    return b'"signed":' in line


def _after_the_last_signed(lines: Lines) -> int:
    return 1 + max(seq for seq, line in enumerate(lines, 1) if _is_signed(line))


def _first_signed_from_5(lines: Lines) -> int:
    return min(seq for seq, line in enumerate(lines, 1) if seq >= 5 and _is_signed(line))


def _torn(lines: Lines) -> Lines:
    return [*lines[:-1], lines[-1][:-9]]


def _reformatted(lines: Lines) -> Lines:
    return [line.replace(b',"record":', b', "record": ') for line in lines]


def _rechained(lines: Lines) -> Lines:
    """A record changed, and every hash after it made to fit, by somebody without the key."""
    made, head = Lines(), bytes(32)
    for line in _changed(lines):
        body = line[line.index(b'"record":') + 9 : -2]
        head = hashlib.sha256(head + int(orjson.loads(line)["seq"]).to_bytes(8, "big") + body).digest()
        made.append(re.sub(rb'"hash":"[0-9a-f]{64}"', b'"hash":"%b"' % head.hex().encode(), line, count=1))
    return made


def _unsigned(lines: Lines) -> Lines:
    return [re.sub(rb',"signed":\{[^}]*\}', b"", line) for line in _rechained(lines)]


def _none(_: Lines) -> Lines:
    return []


@pytest.mark.parametrize(
    ("spoil", "where", "what"),
    [
        (_changed, 5, "does not fit its hash"),
        (_removed, 5, "record 5 is missing"),
        (_swapped, 4, "record 4 is missing"),
        (_beheaded, 1, "line 1 is not as an export has it"),
        (_cut, _after_the_last_signed, "it ends without a signed head"),
        (_torn, 7, "line 7 is not as an export has it"),
        (_reformatted, 1, "line 1 is not as an export has it"),
        (_rechained, _first_signed_from_5, "its signature does not verify"),
        (_unsigned, 0, "no head in it is signed"),
        (_none, 0, "there is no record in it"),
    ],
)
def test_an_export_that_was_touched_is_broken_and_says_where(
    cli: Cli, spoil: Callable[[Lines], Lines], where: int | Callable[[Lines], int], what: str
) -> None:
    spoilt = spoil(exported(cli))
    (cli.path / "spoilt.jsonl").write_bytes(b"".join(spoilt))
    seq = where if isinstance(where, int) else where(spoilt)
    ended = cli("audit", "verify", "--export", "spoilt.jsonl", "--json")
    assert (ended.code, ended.json["intact"]) == (1, False)
    assert any(fault["seq"] == seq and what in fault["what"] for fault in ended.json["faults"]), ended.out


def test_an_export_that_was_signed_anew_with_another_key_fails_the_key_that_is_trusted(cli: Cli) -> None:
    lines, signer = exported(cli), Signer(cli.path)

    def signed(line: bytes) -> bytes:
        row = orjson.loads(line)
        line = re.sub(rb'"public_key":"[0-9a-f]{64}"', b'"public_key":"%b"' % signer.public.hex().encode(), line)
        if "signed" not in row:
            return line
        signature = signer.sign("head", row["seq"], bytes.fromhex(row["hash"]), row["signed"]["at_ms"])
        theirs = b'"key_id":"%b","signature":"%b"' % (signer.key_id.encode(), signature.hex().encode())
        return re.sub(rb'"key_id":"[0-9a-f]+","signature":"[0-9a-f]+"', theirs, line)

    forged = [signed(line) for line in _rechained(lines)]
    assert verify_export(forged).intact
    verdict = verify_export(forged, public_key=bytes.fromhex(key_of(cli)))
    assert not verdict.intact
    assert "signed with the key" in verdict.faults[0].what


def test_an_export_that_names_another_key_than_the_one_that_is_trusted_is_broken(cli: Cli) -> None:
    lines, trusted = exported(cli), key_of(cli)
    renamed = [lines[0].replace(trusted.encode(), b"ab" * 32), *lines[1:]]
    verdict = verify_export(renamed, public_key=bytes.fromhex(trusted))
    assert [fault.what for fault in verdict.faults] == ["it names another public key than the one given"]


def test_an_export_with_a_time_that_no_calendar_has_is_broken(cli: Cli) -> None:
    signer = Signer(cli.path)
    body = b'{"kind":"note","call":"one"}'
    digest, at_ms = hashlib.sha256(bytes(32) + (1).to_bytes(8, "big") + body).digest(), 10**16 - 1
    head = SignedHead(1, digest, at_ms, signer.key_id, signer.sign("head", 1, digest, at_ms))
    (cli.path / "made.jsonl").write_bytes(line_of(1, digest, body, head, public_key=signer.public))
    ended = cli("audit", "verify", "--export", "made.jsonl", "--json")
    assert (ended.code, ended.json["intact"]) == (1, False)


def test_what_retention_removed_is_stood_for_in_an_export(cli: Cli) -> None:
    home, later = home_at(cli.home), Clock().now_ms() + 9 * 366 * 86_400_000
    assert purge(home, load_settings(home.settings), now_ms=later, by="local:auditor")
    lines = exported(cli)
    document = cli.ask("audit", "verify", "--export", "journal.jsonl")
    assert (document["intact"], document["purged_through"]) == (True, 3)
    assert not verify_export(lines[1:]).intact
    moved = [lines[0].replace(b'"after":{"hash":"', b'"after":{"hash":"00', 1), *lines[1:]]
    assert not verify_export(moved).intact


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, copied: Callable[[Path], Cli]) -> bytes:
    return b"".join(exported(copied(tmp_path_factory.mktemp("export"))))


@given(data=st.data())
def test_no_byte_of_an_export_can_be_changed_unseen(whole: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[at]))
    spoilt = whole[:at] + bytes([byte]) + whole[at + 1 :]
    assert not verify_export(io.BytesIO(spoilt)).intact
    assert verify_export(io.BytesIO(whole)).intact
