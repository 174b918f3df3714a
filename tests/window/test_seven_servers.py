"""Seven public MCP servers at once: what a model has in its context, and whether it still finds what it needs.

Without Interlock a client lists every tool of every server, some 48,000 tokens before the first question. The tasks are
written step by step, as the description of `search_tools` asks for. Where servers have tools for the same thing, one of
them is enough.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from statistics import fmean

import orjson
import pytest_asyncio

from interlock import Interlock
from interlock.contract.contract import contract_of
from interlock.data.schema import Json
from interlock.registry import admission
from interlock.registry.admission import TrialEvidence
from interlock.window.tokens import estimate
from tests.support.catalogs import CATALOGS, imported
from tests.support.wires import Wires, wired

SERVERS = (
    "basic-memory", "chrome-devtools", "firecrawl", "playwright", "server-filesystem", "server-github", "server-slack",
)  # fmt: skip
# The steps of each task, with the tools of which the step needs one.
TASKS: list[list[tuple[str, set[str]]]] = [
    [("open an issue in a GitHub repository", {"server-github-create_issue"}),
     ("post a message to a Slack channel", {"server-slack-slack_post_message"})],
    [("take a screenshot of a web page", {"chrome-devtools-take_screenshot", "playwright-browser_take_screenshot"}),
     ("write text to a file on disk", {"server-filesystem-write_file"})],
    [("find files whose names match a pattern", {"server-filesystem-search_files"}),
     ("read the content of a text file", {"server-filesystem-read_text_file", "server-filesystem-read_file"})],
    [("scrape the content of a single URL", {"firecrawl-firecrawl_scrape"}),
     ("save a markdown note to the knowledge base", {"basic-memory-write_note"})],
    [("list the open pull requests of a repository", {"server-github-list_pull_requests"}),
     ("merge a pull request", {"server-github-merge_pull_request"})],
    [("search notes for a keyword", {"basic-memory-search_notes", "basic-memory-search"}),
     ("edit an existing note", {"basic-memory-edit_note"})],
    [("reply in a Slack thread", {"server-slack-slack_reply_to_thread"})],
    [("run a performance trace of a page", {"chrome-devtools-performance_start_trace"}),
     ("list the network requests of the page",
      {"chrome-devtools-list_network_requests", "playwright-browser_network_requests"})],
    [("fill in several fields of a web form", {"chrome-devtools-fill_form", "playwright-browser_fill_form"}),
     ("click a button on the page", {"chrome-devtools-click", "playwright-browser_click"})],
    [("search the code of GitHub repositories", {"server-github-search_code"}),
     ("create a new branch", {"server-github-create_branch"}),
     ("push several files in one commit", {"server-github-push_files"})],
    [("discover all URLs of a website", {"firecrawl-firecrawl_map"})],
    [("search scientific papers", {"firecrawl-firecrawl_research_search_papers"})],
    [("show a recursive tree of a directory", {"server-filesystem-directory_tree"}),
     ("rename a file", {"server-filesystem-move_file"})],
    [("who are the members of the Slack workspace", {"server-slack-slack_get_users"}),
     ("react to a message with an emoji", {"server-slack-slack_add_reaction"})],
    [("read the messages in the browser console",
      {"chrome-devtools-list_console_messages", "playwright-browser_console_messages"})],
    [("upload a file through a web page", {"chrome-devtools-upload_file", "playwright-browser_file_upload"})],
    [("comment on an issue", {"server-github-add_issue_comment"})],
    [("what did I work on recently in my notes", {"basic-memory-recent_activity"})],
    [("run a Lighthouse audit", {"chrome-devtools-lighthouse_audit"})],
    [("watch a website for changes on a schedule", {"firecrawl-firecrawl_monitor_create"})],
]  # fmt: skip


def _catalogs() -> dict[str, list[Json]]:
    return {name: json.loads((CATALOGS / f"{name}.json").read_bytes())["tools"] for name in SERVERS}


@pytest_asyncio.fixture
async def wires(app: Interlock) -> AsyncGenerator[Wires]:
    for name in SERVERS:
        for one in imported(CATALOGS / f"{name}.json", accept_hints=True):
            assert one.manifest is not None
            content = contract_of(one.manifest).digest
            evidence = TrialEvidence(content, True, "test", "")
            app.journal.post(admission.publish(one.manifest, content, f"upstream:{name}", evidence, "test"))
    await app.journal.drain()
    await app.catalog.forget()
    async with wired(app) as opened:
        yield opened


def _size(document: object) -> int:
    return estimate(orjson.dumps(document).decode())


async def _call(wires: Wires, name: str, arguments: Json) -> Json:
    params = {"name": name, "arguments": arguments}
    return orjson.loads(await wires.mcp("tools/call", params, modern=True))["result"]["structuredContent"]


async def test_the_context_is_a_twentieth_of_listing_all_and_every_task_finds_its_tools(wires: Wires) -> None:
    everything = sum(_size(one) for tools in _catalogs().values() for one in tools)
    assert everything > 40_000
    listed = orjson.loads(await wires.mcp("tools/list", {}, modern=True))["result"]["tools"]
    standing = _size(listed)
    assert standing <= everything / 50
    contexts: list[int] = []
    ordinary: list[int] = []  # without tasks whose tools have schemas that take a twentieth by themselves
    missed: list[str] = []
    for task in TASKS:
        told = await _call(wires, "search_tools", {"queries": [step for step, _ in task]})
        wanted: list[str] = []
        for (step, needed), found in zip(task, told["results"], strict=True):
            names = [one["name"] for one in found["tools"]]
            missed += [] if needed & set(names) else [f"{step}: {names}"]
            wanted += [name for name in names if name in needed][:1]
        loaded = await _call(wires, "load_tools", {"names": wanted})
        contexts.append(standing + _size(told) + _size(loaded))
        ordinary += contexts[-1:] if standing + _size(loaded) <= everything / 20 else []
        assert all("score" not in one for found in told["results"] for one in found["tools"])
    assert missed == []  # listing all has every tool in the context, and so has this
    assert fmean(contexts) <= everything / 20, (contexts, everything)
    assert len(ordinary) == len(TASKS) - 2
    assert max(ordinary) <= everything / 20, (contexts, everything)
