"""`interlock surface show`: what a caller is offered, and why."""

from __future__ import annotations

from tests.support.cli import Cli


def test_the_command_line_shows_what_a_caller_is_offered_and_why(cli: Cli) -> None:
    told = cli.ask("surface", "show")
    assert told["surface"]["selection_policy"] == "all"
    assert "demo.balance" in told["surface"]["loaded_tools"]
    assert told["reasons"]["demo.balance"] == "role"
    shown = cli("surface", "show").out
    assert "no more than 100 tools" in shown
    assert ["demo.balance", "loaded", "role"] in [line.split() for line in shown.splitlines()]
    settings = cli.home / "settings.toml"
    settings.write_text(
        'surface = "search"\n[[surface_pinned]]\ntools = ["demo.balance"]\n'
        '[[surface_excluded]]\ntools = ["demo.post"]\n'
    )
    told = cli.ask("surface", "show")
    assert told["surface"]["loaded_tools"] == ["demo.balance"]
    assert told["reasons"]["demo.balance"] == "pinned"
    assert told["reasons"]["demo.post"] == "feature_disabled"
    assert "demo.post" not in told["surface"]["tool_refs"]
    assert cli("surface", "show", "--caller", "nobody").code == 1
    refused = cli("call", "demo.post", '{"account": "cash", "cents": 1}', "--key", "excluded", "--json")
    assert refused.json["error"]["error_code"] == "E3101"
    assert cli("call", "demo.balance", '{"account": "cash"}').code == 0
