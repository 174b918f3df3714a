"""`interlock tools cost`: what tools take in the context window of a model."""

from __future__ import annotations

from interlock.window.blocks import read_blocks
from tests.support.cli import Cli


def test_the_command_line_shows_what_tools_take(cli: Cli) -> None:
    told = cli.ask("tools", "cost")
    assert told["counter"] == "estimate"
    assert told["index_mean"] <= 10
    shown = cli("tools", "cost").out
    assert f"full schemas: {told['tools']} x {told['full_mean']:g} = {told['full_tokens']:,} tokens" in shown
    assert "demo.post" in shown


def test_the_command_line_writes_what_a_model_is_offered(cli: Cli) -> None:
    told = cli.ask("tools", "affordances", "--budget", "3000", "balance")
    assert told["tokens"] + told["remaining"] == 3000
    assert told["loaded"][0]["name"] == "demo.balance"
    shown = cli("tools", "affordances", "--budget", "3000", "balance")
    assert shown.out == told["text"]
    assert f"{told['tokens']} of 3,000 tokens: index of tools" in shown.err
    part = cli("tools", "schema", "demo.balance", "/properties/account")
    assert '"type": "string"' in part.out
    assert cli("tools", "schema", "demo.balance", "/nowhere").code == 1


def test_a_result_is_printed_as_a_model_gets_it(cli: Cli) -> None:
    shown = cli("call", "demo.balance", '{"account": "cash"}', "--tokens", "200")
    assert shown.code == 0
    (block,) = read_blocks(shown.out)
    assert block.tool_id.startswith("demo.balance@")
    told = cli.ask("call", "demo.balance", '{"account": "cash"}', "--tokens", "200")
    assert told["level"] == 0
    assert told["tokens"] <= 200
    assert cli("calls", "part", "01JC", "--range", "x").code == 2
    missing = cli("calls", "part", "01JC", "--at", "/a")
    assert missing.code == 1
    assert "E3702" in missing.err
