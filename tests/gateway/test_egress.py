"""A sandboxed tool that may reach one host reaches that one, through the proxy, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from interlock import Interlock, Sandboxing, tool
from interlock.call.capability import Capability, Link, ToolGrant
from interlock.contract.manifest import NetworkPolicy
from interlock.executors import egress
from interlock.executors.egress import EgressPolicy
from tests.support import isolated_tools as cell
from tests.support.calls import code, publish, records
from tests.support.hosts import upstream as upstream


def bound_to(*resources: str) -> Capability:
    """What a token carries that names these resources."""
    link = Link(
        jti="j", subject="did:key:z", scopes=frozenset(), tools=(ToolGrant("cell.*"),), not_before=0, expires=2**40,
        resources=resources, constraints={},
    )  # fmt: skip
    return Capability(digest="d".join(resources), issuer="i", links=(link,))


@pytest.mark.part_of(
    "EXEC-06",
    rest="Python tools without `sandbox`, which are trusted code and not confined; for upstreams, an agent that has no "
    "entry in egress_of reaches each one that an operator has added",
)
async def test_only_what_operator_and_manifest_both_list_is_reached(
    tmp_path: Path, upstream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one thing a test on one machine cannot have: a public address. Everything else is as it is.
    monkeypatch.setattr(egress, "EgressPolicy", partial(EgressPolicy, allow_private=True))
    listed = {"allowed_domains": ["localhost"], "allowed_ports": [upstream]}
    own = {"did:key:narrow": {"allowed_domains": ["elsewhere.test"], "allowed_ports": [upstream]}}
    async with Interlock.open(tmp_path / "home", housekeeping=False, egress=listed, egress_of=own) as app:
        network = NetworkPolicy(allowed_domains=("localhost", "elsewhere.test"), allowed_ports=(upstream,))  # pyright: ignore[reportCallIssue] - defaults
        declare = tool(
            version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=Sandboxing(tier=2), network=network,
            timeout_s=60,
        )  # fmt: skip
        fetch = declare(cell.fetch.function)
        await app.journal.commit(publish(fetch))
        app.catalog.attach(fetch)
        assert (await app.call("cell.fetch", url=f"http://localhost:{upstream}/")).unwrap() == "200 hello"
        for url in (f"http://elsewhere.test:{upstream}/", "http://localhost:1/", f"http://127.0.0.1:{upstream}/"):
            assert code(await app.call("cell.fetch", url=url)) == "E3406"
        assert len(records(app, kind="violation")) == 3
        # An agent with an allowance of its own has that one, whoever it acts for.
        narrow = replace(app.caller, agent="did:key:narrow")
        refused = await app.call("cell.fetch", url=f"http://localhost:{upstream}/", caller=narrow)
        assert code(refused) == "E3406"
        assert "the agent's allowance" in str(refused.error)
        assert len(records(app, kind="violation")) == 4
        # A token that names resources must name the host as well.
        url = f"http://localhost:{upstream}/"
        named: dict[str, str | None] = {"host:elsewhere.test:*": "E3406", f"host:localhost:{upstream}": None}
        for host, expected in named.items():
            holder = replace(app.caller, capability=bound_to("http://localhost:*", host))
            assert code(await app.call("cell.fetch", url=url, caller=holder)) == expected
        # It says that it only reads.
        posted = await app.call("cell.fetch", url=f"http://localhost:{upstream}/post")
        assert posted.error is not None
        assert posted.error.details is not None
        assert posted.error.details["violation"] == "MUTATION_CLASS_VIOLATION"
        assert code(await app.call("cell.fetch", url=f"http://localhost:{upstream}/")) == "E3210"
