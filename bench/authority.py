"""`authority`: what tokens and policies add to a call, decisions over few and many rules, issue and verify rates."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench import ours, peers
from bench.calls import BATCHED, DURABLE_MANY, goals
from bench.measure import Contender, Figure, Plan, compare, number
from bench.payloads import PAYLOADS
from bench.report import Table, verdict
from interlock import Interlock
from interlock.authority.decisions import Question
from interlock.authority.dids import make_did_key
from interlock.authority.identities import Identity
from interlock.authority.keys import Algorithm, make_private
from interlock.authority.policy import Policies, make_defaults
from interlock.call.context import Caller
from interlock.core.clock import Clock

SMALL = PAYLOADS[0]
LOCAL = "as the local user"
TOKEN = "with a token of three links"
ADDED_US = 30.0
UNCACHED_US = 200.0


async def run(plan: Plan) -> list[Table]:
    async with ours.opened("batched") as app:
        token = await _token(app)
        calls = await _calls(app, token, plan)
        cached = await _cached(app, token, plan)
        return [
            _added(calls, cached),
            goals(await _against_peers(app, token, plan), ", with a token of three links"),
            *await _decisions(app, plan),
            await _rates(plan),
        ]


async def _against_peers(batched: Interlock, token: str, plan: Plan) -> dict[str, Mapping[str, Figure]]:
    """The calls that goals were set for, made with a token, beside the peers, which have nothing like it."""
    figures: dict[str, Mapping[str, Figure]] = {}
    async with ours.opened("durable") as durable:
        other = await _token(durable)
        for payload in PAYLOADS[:2]:
            field = [
                ours.contender(batched, payload, BATCHED, token=token),
                ours.contender(durable, payload, DURABLE_MANY, ours.MANY, token=other),
                peers.langchain(payload),
                *await peers.pydantic_ai(payload),
            ]
            for contender in field:
                await contender.check(payload.expected)
            figures[payload.name] = await compare(field, plan)
    return figures


async def _token(app: Interlock) -> str:
    """A token for an agent that acts for an agent that acts for a person."""
    names = {"alice": "human", "planner": "agent", "scout": "agent"}
    dids = {name: make_did_key(make_private("EdDSA").public_key()) for name in names}
    for name, kind in names.items():
        await app.identities.register(Identity(did=dids[name], kind=kind, name=name), by="bench")  # pyright: ignore[reportArgumentType] - literals
    app.issuer_keys.init()
    token = await app.tokens.issue(subject=dids["planner"], user=dids["alice"], by=app.caller)
    return await app.tokens.delegate(token, subject=dids["scout"], ttl_s=600, by=app.caller)


async def _calls(app: Interlock, token: str, plan: Plan) -> dict[str, Figure]:
    address, arguments = f"bench.{SMALL.function.__name__}", SMALL.arguments
    return await compare(
        [
            Contender(name=LOCAL, call=lambda: app.call(address, arguments), settle=app.journal.drain),
            Contender(name=TOKEN, call=lambda: app.call(address, arguments, token=token), settle=app.journal.drain),
        ],
        plan,
    )


async def _cached(app: Interlock, token: str, plan: Plan) -> Figure:
    """The token found and checked, and the decision found: all that authority does in a call that came before."""
    contract = (await app.catalog.resolve("bench.add", None)).contract
    caller = await app.caller_of(token)

    async def decide() -> Any:
        found = app.tokens.verifier.known(token)
        assert found is not None
        assert found.capability is not None
        app.tokens.verifier.check(found.capability)
        found.capability.covers("bench.add", "1.0.0")
        now_ms = time.time_ns() // 10**6
        question = Question(
            found, contract, contract.digest, SMALL.arguments, "invoke", "", "library", None, (0, 0), now_ms
        )
        return app.policy.cached(question) or app.policy.judge(question)

    assert caller.capability is not None
    return (await compare([Contender(name="cached", call=decide)], plan))["cached"]


def _added(calls: dict[str, Figure], cached: Figure) -> Table:
    rows = [
        (f"a call, {LOCAL}", str(calls[LOCAL]), calls[LOCAL].spread, "", ""),
        (f"a call, {TOKEN}", str(calls[TOKEN]), calls[TOKEN].spread, "", ""),
        (
            "cached token and cached decision alone", str(cached), cached.spread, f"<= {ADDED_US:.0f}",
            verdict(cached.us <= ADDED_US),
        ),
    ]  # fmt: skip
    return Table("What authority adds", ("", "CPU µs", "quartiles", "goal", ""), rows)


async def _decisions(app: Interlock, plan: Plan) -> list[Table]:
    contract = (await app.catalog.resolve("bench.add", None)).contract
    rows: list[tuple[str, ...]] = []
    for count in (10, 100, 1_000, 10_000):
        with tempfile.TemporaryDirectory(prefix="interlock-bench-") as directory:
            home = Path(directory)
            (home / "policy.cedar").write_text(_rules(count))
            make_defaults(home / "policy.cedar", home / "principals.toml")
            began = time.process_time()
            policies = Policies(home / "policy.cedar", home / "principals.toml", clock=Clock())
            caller = policies.principal("local:bench")
            asked = itertools.count()

            def decide(who: Any = caller, policies: Policies = policies, asked: Any = asked) -> str:
                arguments = {"a": next(asked), "b": 2}
                question = Question(who, contract, contract.digest, arguments, "invoke", "", "library", None, (0, 0), 0)
                return policies.judge(question).behavior

            assert decide() == "allow"
            loaded_s = time.process_time() - began
            strangers = [Caller(id=f"local:{n}", trust=100) for n in range(200)]
            first = _timed(partial(_next_of, strangers, decide), 10)
            figure = _timed(decide, 20 if plan.quick else 200)
            goal = (f"<= {UNCACHED_US:.0f}", verdict(figure.us <= UNCACHED_US)) if count == 100 else ("", "")
            rows.append((f"{count:,}", f"{loaded_s * 1e3:,.0f}", str(first), str(figure), figure.spread, *goal))
    columns = (
        "rules",
        "CPU ms to load",
        "µs, caller never seen",
        "CPU µs per uncached decision",
        "quartiles",
        "goal",
        "",
    )
    note = (
        "Every rule could apply to every caller, and one reads the arguments, so that no decision is found again. Rules"
        " that read nothing of a call are weighed once per caller and tool."
    )
    return [Table("Cedar decisions", columns, rows, note)]


def _next_of(strangers: list[Caller], decide: Callable[[Caller], str]) -> str:
    return decide(strangers.pop())


def _rules(count: int) -> str:
    """So many rules that could all match: forbids for other trust levels, hosts and hours, and one that permits."""
    forbids = [
        f'@id("rule-{n}") forbid (principal, action, resource) when {{ principal.trust == {1000 + n} }};'
        for n in range(count - 2)
    ]
    tool = 'action == Action::"bench.add"'
    asking = f'@id("large") forbid (principal, {tool}, resource) when {{ context.arguments.a < 0 }};'
    return "\n".join([*forbids, asking, '@id("all") permit (principal, action, resource);'])


async def _rates(plan: Plan) -> Table:
    rows: list[tuple[str, ...]] = []
    subject = make_did_key(make_private("EdDSA").public_key())
    algorithms: tuple[Algorithm, ...] = ("RS256", "EdDSA", "ES256")
    for algorithm in algorithms:
        async with ours.opened("durable") as app:  # a home knows the key that signs for it
            app.issuer_keys.init(algorithm)
            await app.identities.register(Identity(did=subject, kind="agent", name="rated"), by="bench")
            tokens = app.tokens
            count = 50 if plan.quick else 300
            began = time.process_time()
            issued = [await tokens.issue(subject=subject, by=app.caller) for _ in range(count)]
            issue_us = (time.process_time() - began) / count * 1e6
            began = time.process_time()
            for token in issued:
                await tokens.verifier.verify(token)
            verify_us = (time.process_time() - began) / count * 1e6
            rates = (f"{1e6 / issue_us:,.0f}", number(verify_us), f"{1e6 / verify_us:,.0f}")
            rows.append((algorithm, number(issue_us), *rates))
    columns = ("", "CPU µs to issue", "issued/s", "CPU µs to verify", "verified/s")
    note = "Issuing writes a durable record each time; verifying is of tokens never seen before."
    return Table("Tokens", columns, rows, note)


def _timed(work: Callable[[], Any], rounds: int) -> Figure:
    samples: list[float] = []
    for _ in range(rounds):
        began = time.process_time_ns()
        for _ in range(10):
            work()
        samples.append((time.process_time_ns() - began) / 10 / 1e3)
    return Figure.of(samples, 10)
