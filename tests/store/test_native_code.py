"""The code of tools that are not isolated, on machines that share a PostgreSQL store: no machine runs other code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Cli
from tests.support.postgres import Server

NOT_COPIED = shutil.ignore_patterns("anchors.jsonl", "instances", "*.lock")
TOOL = '''
"""One tool, whose result comes from the module beside it."""
from pathlib import Path

from interlock import tool
from acme_pay import rates

Path("loaded").touch()


@tool(namespace="acme", version="1.0.0", mutation_class="read_only")
async def quote() -> int:
    """The rate of today, in cents."""
    return rates.RATE
'''


def machine(path: Path, version: str, store: str = "") -> Cli:
    """A machine with a data directory of its own, on which a distribution of the tool's package is installed."""
    path.mkdir()
    if version:
        install(path, version)
    return Cli(path, {"INTERLOCK_STORE": store} if store else {})


def install(path: Path, version: str) -> None:
    package, about = path / "acme_pay", path / f"acme_pay-{version}.dist-info"
    for directory in (package, about):
        directory.mkdir()
    (package / "__init__.py").touch()
    (package / "tools.py").write_text(TOOL)
    (package / "rates.py").write_text(f"RATE = {version[0]}\n")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-pay\nVersion: {version}\n")
    (about / "top_level.txt").write_text("acme_pay\n")
    (about / "RECORD").write_text("".join(f"acme_pay/{name}.py,,\n" for name in ("__init__", "tools", "rates")))


def quote(cli: Cli) -> Any:
    (cli.path / "loaded").unlink(missing_ok=True)
    return cli.call("acme.quote")


def refused(cli: Cli) -> tuple[str, str]:
    """The words of a refusal and what they advise. Nothing of the tool was executed."""
    error = quote(cli)["error"]
    assert error["error_code"] == "E3108"
    assert not (cli.path / "loaded").exists()
    return error["message"], error["resolution"]


def test_a_machine_that_lacks_the_code_of_a_tool_or_has_other_code_says_what_to_install_and_runs_nothing(
    tmp_path: Path, postgres_server: Server
) -> None:
    store = postgres_server.new_schema()
    first, second, third = (
        machine(tmp_path / name, version, store) for name, version in (("a", "1.0.0"), ("b", "2.0.0"), ("c", ""))
    )
    assert first("tools", "add", "acme_pay.tools").code == 0
    assert quote(first)["structured_content"] == 1
    for other in (second, third):
        shutil.copytree(first.home, other.home, ignore=NOT_COPIED)

    words, advice = refused(second)
    assert "acme.quote@1.0.0 cannot run here: this machine has other code" in words
    assert "acme-pay==2.0.0" in words
    assert "install acme-pay==1.0.0 on this machine" in advice
    words, advice = refused(third)
    assert "its code is not on this machine" in words
    assert advice == "install acme-pay==1.0.0 on this machine"
    found = second("doctor")
    assert "acme.quote@1.0.0 cannot be called: this machine has other code" in found.out
    assert "install acme-pay==1.0.0" in found.out
    assert not (second.path / "loaded").exists()

    # With the right distribution it runs.
    install(third.path, "1.0.0")
    assert quote(third)["structured_content"] == 1

    # The same version with an edited file is other code.
    (third.path / "acme_pay" / "rates.py").write_text("RATE = 9000\n")
    assert "acme-pay==1.0.0" in refused(third)[0]

    # An administrator may admit the other code too, which an upgrade of the machines one by one needs.
    assert second("tools", "add", "acme_pay.tools").code == 0
    assert [quote(cli)["structured_content"] for cli in (first, second)] == [1, 2]
    assert "acme-pay==2.0.0" in refused(third)[1]
    records = [line for line in first("audit", "export").out.splitlines() if '"tool.code"' in line]
    assert len(records) == 1
    assert "acme-pay==2.0.0" in records[0]
    assert first("audit", "verify").code == 0


def test_a_file_is_compared_by_its_text(tmp_path: Path, postgres_server: Server) -> None:
    cli = machine(tmp_path / "a", "1.0.0", postgres_server.new_schema())
    file = cli.path / "acme_file.py"
    file.write_text(TOOL.replace("from acme_pay import rates", "class rates:\n    RATE = 5"))
    assert cli("tools", "add", "acme_file.py").code == 0
    assert quote(cli)["structured_content"] == 5
    file.write_text(file.read_text().replace("RATE = 5", "RATE = 6"))
    words, advice = refused(cli)
    assert "other code" in words
    assert "copy `acme_file.py` and the modules beside it" in advice


PROGRAM = """
tool_id: count_words
namespace: text
version: 1.0.0
name: Count words
description: How many words a text has.
provider: local
protocol: native
mutation_class: read_only
parameters:
  type: object
  required: [text]
  properties:
    text: {type: string, description: the text, examples: [to be or not to be]}
result_schema: {type: integer}
required_permissions: []
idempotency: {}
observability: {}
timeout_class: standard
execution: {kind: program, target: wc, argv: [wc, -w], stdin: text, parse: json}
"""


def test_a_program_runs_on_machines_that_lack_the_file_of_its_manifest_as_it_was_admitted(
    tmp_path: Path, postgres_server: Server
) -> None:
    store = postgres_server.new_schema()
    first, second = (machine(tmp_path / name, "", store) for name in "ab")
    file = first.path / "text.yaml"
    file.write_text(PROGRAM)
    assert first("tools", "add", "text.yaml").code == 0
    shutil.copytree(first.home, second.home, ignore=NOT_COPIED)
    file.write_text(PROGRAM.replace("-w", "-l"))  # which nobody has added
    for cli in (first, second):
        assert cli.call("text.count_words", {"text": "in four small words"})["structured_content"] == 4
        assert "1 of 1 added from files and modules load as they were admitted" in cli("doctor").out


@pytest.mark.sqlite_only("the store of one machine")
def test_on_one_machine_the_code_around_a_tool_may_change(tmp_path: Path) -> None:
    cli = machine(tmp_path / "a", "1.0.0")
    assert cli("tools", "add", "acme_pay.tools").code == 0
    (cli.path / "acme_pay" / "rates.py").write_text("RATE = 9000\n")
    assert quote(cli)["structured_content"] == 9000
