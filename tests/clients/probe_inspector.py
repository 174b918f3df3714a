"""The command line of the MCP Inspector. It has no means for progress, cancellation and questions."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from tests.clients.common import AS_TASK, PATIENCE_S, Report, approved, task
from tests.clients.target import Target
from tests.support.mcp_servers.real import (
    CACHE,
    install_once,
    node_binary,
    run_command,
)

LOCKED = Path(__file__).with_name("inspector")
LOCKS = (LOCKED / "package.json", LOCKED / "package-lock.json")


def _install(folder: Path) -> None:
    for one in LOCKS:
        shutil.copy(one, folder / one.name)
    # `npm ci` refuses a lock without the optional packages of other platforms, which npm does not write into it.
    npm = node_binary().parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    run_command(
        [str(node_binary()), str(npm), "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund"], folder
    )


async def inspector(target: Target, wire: str) -> set[str]:
    folder = CACHE / "inspector"
    await asyncio.to_thread(install_once, folder, LOCKS, _install)
    program = folder / "node_modules" / "@modelcontextprotocol" / "inspector" / "clients" / "launcher" / "build"
    where = target.command if wire == "stdio" else [target.url]
    patient = ["--connect-timeout", str(PATIENCE_S * 1000)]
    bearer = [] if wire == "stdio" else ["--header", f"Authorization: Bearer {target.token}"]

    async def ask(method: str, *options: str) -> Any:
        command = [
            str(node_binary()),
            str(program / "index.js"),
            "--cli",
            *where,
            "--method",
            method,
            *options,
            *bearer,
            *patient,
        ]
        made = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1, cwd=folder)
        said, complaint = await made.communicate()
        assert said, complaint.decode()[-2000:]
        return json.loads(said)

    async def as_task() -> str:
        name, arguments = AS_TASK
        given = [f"{key}={value}" for key, value in arguments.items()]
        made = await ask("tools/call", "--tool-name", name, "--tool-arg", *given, "--protocol-era", "modern")
        return json.dumps(made)

    def send(given: dict[str, Any]) -> Any:
        return ask("tools/call", "--tool-name", "probe-send", "--tool-arg", *(f"{key}={given[key]}" for key in given))

    report = Report()
    report("list", "probe-add" in {one["name"] for one in (await ask("tools/list"))["tools"]})
    added = await ask("tools/call", "--tool-name", "probe-add", "--tool-arg", "a=1", "b=2")
    report("call", added["content"][0]["text"] == '{"sum":3}')
    report("structured result", added["structuredContent"] == {"sum": 3})
    picture = await ask("tools/call", "--tool-name", "probe-picture")
    report("images", "image" in {one["type"] for one in picture["content"]})
    report("approvals", await approved(send))
    failed = await ask("tools/call", "--tool-name", "probe-fail", "--tool-arg", "a=2")
    report("error", failed["isError"] and "on purpose" in failed["content"][0]["text"])
    (resource,) = (await ask("resources/list"))["resources"]
    read = await ask("resources/read", "--uri", resource["uri"])
    report("resources", read["contents"][0]["text"] == "a note")
    (prompt,) = (await ask("prompts/list"))["prompts"]
    said = await ask("prompts/get", "--prompt-name", prompt["name"], "--prompt-args", "who=ann")
    report("prompts", said["messages"][0]["content"]["text"] == "greet ann")
    report("tasks", await task(as_task()))
    return report.worked
