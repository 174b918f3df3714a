"""`interlock tools cost`: what tools take in the context window of a model."""

from __future__ import annotations

from tests.cli.conftest import Cli


def test_the_command_line_shows_what_tools_take(cli: Cli) -> None:
    told = cli.ask("tools", "cost")
    assert told["counter"] == "estimate"
    assert told["index_mean"] <= 10
    shown = cli("tools", "cost").out
    assert f"full schemas: {told['tools']} x {told['full_mean']:g} = {told['full_tokens']:,} tokens" in shown
    assert "demo.post" in shown
