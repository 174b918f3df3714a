"""What it costs to add a large OpenAPI document: memory, processor time, and the data directory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from docs.openapi_admission import PACKAGES, SAMPLED
from interlock.store.homes import home_at
from tests.support.mcp_servers.real import node_archive
from tests.support.openapi import document
from tests.support.stores import opened
from tests.thorough import THOROUGH

Json = dict[str, Any]
MB = 1_000_000


def webbed(operations: int, definitions: int) -> Json:
    """A document as large ones are: each definition leads to all others, and each operation answers with one."""
    schemas: Json = {
        f"Thing{number}": {
            "type": "object",
            "description": f"Thing {number} of a service, with whatever belongs to it.",
            "properties": {
                "id": {"type": "string", "description": "The name of the thing."},
                **{
                    f"next{step}": {"$ref": f"#/components/schemas/Thing{(number * 3 + step) % definitions}"}
                    for step in range(4)
                },
            },
        }
        for number in range(definitions)
    }
    answers: list[Json] = [
        {"$ref": f"#/components/schemas/Thing{number % definitions}"} for number in range(operations)
    ]
    paths: Json = {
        f"/things/{number}": {
            "get": {
                "operationId": f"thing{number}",
                "responses": {"200": {"description": "", "content": {"application/json": {"schema": answer}}}},
            }
        }
        for number, answer in enumerate(answers)
    }
    return document(paths, components={"schemas": schemas})


def add(file: Path, home: Path) -> tuple[int, resource.struct_rusage]:
    """Add a document by the command, in a process of its own: how many tools were admitted, and what it took."""
    words = ["--home", str(home), "upstream", "add", "openapi", "it", str(file), "--url", "https://api.example.com"]
    command = [sys.executable, "-m", "interlock.cli", *words, "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        told = orjson.loads(child.stdout.read())
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return sum(one["state"] == "admitted" for one in told["tools"]), used


def stored_bytes(home: Path) -> tuple[int, int]:
    """How long the manifests of all tools are together, and how long the longest is."""
    with opened(home_at(home)) as database:
        return database.execute("SELECT sum(length(manifest)), max(length(manifest)) FROM tool_version").fetchone()


@pytest.mark.sqlite_only("the size of the file of the store is counted")
def test_tools_of_a_large_document_hold_a_part_of_it_each(tmp_path: Path) -> None:
    large = webbed(operations=60, definitions=600)
    whole = len(orjson.dumps(large["components"]))
    file, home = tmp_path / "large.json", tmp_path / "home"
    file.write_bytes(orjson.dumps(large))
    assert add(file, home)[0] == 60
    total, longest = stored_bytes(home)
    assert longest < whole / 2, "no tool holds all that its result leads to"
    assert total < 60 * whole / 2
    assert sum(one.stat().st_size for one in home.rglob("*") if one.is_file()) < 60 * whole / 2 + 4 * MB


@pytest.mark.skipif(not THOROUGH, reason="fetches 74 MB")
@pytest.mark.sqlite_only("the size of the file of the store is counted")
def test_the_document_of_stripe_takes_less_than_ten_seconds_and_200_megabytes(tmp_path: Path) -> None:
    """Memory and bytes on disk are the same on every machine. Processor time is that of this one."""
    node_archive(SAMPLED, PACKAGES[SAMPLED], tmp_path / "package")
    home = tmp_path / "home"
    admitted, used = add(tmp_path / "package" / "package" / "api" / "stripe.com.json", home)
    assert admitted == 452
    assert used.ru_maxrss * 1024 < 200 * MB
    assert used.ru_utime + used.ru_stime < 15, "less than 10 s where nothing else runs"
    assert sum(one.stat().st_size for one in home.rglob("*") if one.is_file()) < 35 * MB
