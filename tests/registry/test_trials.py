"""Contract tests: what follows from a contract, run without an effect nobody asked for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock import Change, Context, Effect, Failure, Field, Interlock, Preview, Tool, tool
from interlock.api.interlock import Admission
from interlock.call.phases import Request
from interlock.call.results import Result
from interlock.contract.cases import Case, cases_of
from interlock.contract.contract import Contract, parse_contract
from interlock.data.coerce import coerce
from interlock.data.schema import Schema
from interlock.gateway.invoke import Gateway
from interlock.registry.catalog import contract_digest

Json = dict[str, Any]
AnyTool = Tool[..., Any]
Account = Annotated[str, Field(description="ledger account", examples=["cash", "bank"], min_length=2, max_length=8)]
Cents = Annotated[int, Field(description="amount", examples=[250], ge=1, le=10_000)]
UPDATES = [Effect("account:{account}", "UPDATE")]


@dataclass
class Ledger:
    """What really happened."""

    posted: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    undone: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    previewed: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    open_fixtures: int = 0


def posting(ledger: Ledger, version: str = "1.0.0") -> AnyTool:
    """A write tool that can be undone, and can neither be previewed nor tried in a fixture."""

    @tool(version=version, mutation_class="write_reversible", namespace="demo", effects=UPDATES)
    def post(ctx: Context, account: Account, cents: Cents) -> dict[str, int]:
        """Post an amount to an account."""
        ledger.posted.append((account, cents))
        ctx.effect(f"account:{account}", "UPDATE", before=0, after=cents)
        return {"balance": sum(amount for _, amount in ledger.posted)}

    @post.compensate
    async def undo(entry: dict[str, int]) -> None:
        ledger.undone.append(ledger.posted.pop())

    return post


def with_preview(ledger: Ledger) -> AnyTool:
    post = posting(ledger)

    @post.preview
    async def preview(account: str, cents: int) -> Preview:
        ledger.previewed.append((account, cents))
        return Preview(impact="adds to the account")

    return post


async def offer(app: Interlock, candidate: AnyTool) -> Admission:
    return await app.offer(candidate, "library:")


def reason(answer: Admission) -> str:
    assert set(answer.verdict.refused) == {"contract_tests_passing"}
    [words] = answer.verdict.refused["contract_tests_passing"]
    return words


async def test_a_read_only_tool_runs_its_examples_and_no_other_input_reaches_it(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    @tool(version="1.0.0", mutation_class="read_only", namespace="demo")
    async def fee(account: Account, cents: Cents) -> int:
        """Fee for posting an amount."""
        seen.append((account, cents))
        return cents // 100

    async with Interlock.open(tmp_path) as app:
        answer = await offer(app, fee)
        assert answer.admitted
        assert answer.trial is not None
        assert answer.trial.mode == "examples"
        assert len(answer.trial.outcomes) > 10
        assert seen == [("cash", 250), ("bank", 250)]
        # Nothing of the trial is in the home's own journal.
        assert [row[0] for row in app.journal.reader.all("SELECT kind FROM journal")] == ["registry"]


async def test_a_write_tool_with_a_preview_is_only_previewed(tmp_path: Path) -> None:
    ledger = Ledger()
    async with Interlock.open(tmp_path) as app:
        answer = await offer(app, with_preview(ledger))
        assert answer.admitted
        assert answer.trial is not None
        assert answer.trial.mode == "preview"
        assert ledger.posted == []
        assert set(ledger.previewed) == {("cash", 250), ("bank", 250)}


async def test_an_irreversible_tool_is_only_previewed(tmp_path: Path) -> None:
    sent: list[str] = []

    @tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=UPDATES)
    async def close_account(ctx: Context, account: Account) -> bool:
        """Close an account for good."""
        sent.append(account)
        return True

    @close_account.preview
    async def preview(account: str) -> Preview:
        return Preview(impact=f"closes {account}")

    async with Interlock.open(tmp_path) as app:
        assert (await offer(app, close_account)).admitted
        assert sent == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("closes cash", "the tool's preview returned `str`"),
        (None, "the tool's preview returned `NoneType`"),
        (
            Preview(effects=cast("Any", Change(resource="account:cash", operation="UPDATE"))),
            "the `effects` of the tool's preview",
        ),
        (Preview(effects=cast("Any", ("account:cash",))), "the `effects` of the tool's preview"),
        (Preview(preconditions=cast("Any", None)), "the `preconditions` of the tool's preview"),
    ],
)
async def test_a_preview_that_is_none_is_the_fault_of_its_tool_and_told_as_such(
    tmp_path: Path, answer: Any, words: str
) -> None:
    @tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=UPDATES)
    async def close_account(account: Account) -> bool:
        """Close an account for good."""
        return True

    @close_account.preview
    def preview(account: str) -> Any:
        return answer

    async with Interlock.open(tmp_path) as app:
        told = reason(await offer(app, close_account))
        assert words in told
        assert "Preview(" in told


def sync_generator(ledger: Ledger) -> Any:
    def fixture() -> Generator[Json]:
        ledger.open_fixtures += 1
        yield {"account": "test", "cents": 5}
        ledger.open_fixtures -= 1

    return fixture


def async_generator(ledger: Ledger) -> Any:
    async def fixture() -> AsyncGenerator[Json]:
        ledger.open_fixtures += 1
        yield {"account": "test", "cents": 5}
        ledger.open_fixtures -= 1

    return fixture


def sync_manager(ledger: Ledger) -> Any:
    return contextmanager(sync_generator(ledger))


def async_manager(ledger: Ledger) -> Any:
    return asynccontextmanager(async_generator(ledger))


@pytest.mark.supports("TEST-01")
@pytest.mark.parametrize(
    "make",
    [
        sync_generator,
        async_generator,
        sync_manager,
        async_manager,
    ],
    ids=["generator", "async generator", "context manager", "async context manager"],
)
async def test_in_a_fixture_a_write_tool_really_runs_and_the_same_key_runs_it_once(tmp_path: Path, make: Any) -> None:
    ledger = Ledger()
    post = posting(ledger)
    post.fixture(make(ledger))
    async with Interlock.open(tmp_path) as app:
        answer = await offer(app, post)
        assert answer.trial is not None
        assert answer.trial.passed
        assert answer.trial.mode == "fixture"
        cases = [outcome.case for outcome in answer.trial.outcomes[-3:]]
        assert cases == ["fixture", "fixture again under its key", "fixture undone"]
        assert (ledger.posted, ledger.undone) == ([], [("test", 5)])
        assert ledger.open_fixtures == 0
        assert answer.admitted


async def test_a_fixture_that_breaks_is_a_refusal_with_its_reason(tmp_path: Path) -> None:
    post = posting(Ledger())

    @post.fixture
    def fixture() -> Generator[Json]:
        raise ConnectionError("no test ledger here")
        yield {}

    async with Interlock.open(tmp_path) as app:
        answer = await offer(app, post)
        assert "the fixture failed" in reason(answer)
        assert "no test ledger here" in reason(answer)


@pytest.mark.supports("TEST-01")
async def test_a_write_tool_with_neither_is_refused_until_it_was_tried_for_real(tmp_path: Path) -> None:
    ledger = Ledger()
    post = posting(ledger)
    async with Interlock.open(tmp_path) as app:
        answer = await offer(app, post)
        for way in ("@tool.preview", "@tool.fixture", "--live"):
            assert way in reason(answer)
        assert ledger.posted == []
        trial = await app.try_out(post, live=True)
        assert (trial.passed, trial.mode) == (True, "live")
        # Each example ran once, for its second call under the same key was a replay; then it was undone.
        assert (ledger.posted, ledger.undone) == ([], [("cash", 250), ("bank", 250)])
        cases = [outcome.case for outcome in trial.outcomes]
        assert cases.count("example 1 again under its key") == 1
        assert (await offer(app, post)).admitted
        assert len(ledger.undone) == 2


@pytest.mark.proves("EFFECT-08")
async def test_a_reversible_tool_that_yields_nothing_to_undo_it_with_fails(tmp_path: Path) -> None:
    def undo(account: str, entry: int, cents: int) -> None:
        """Ask for something that nobody told it."""

    @tool(version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=UPDATES)
    def silent(ctx: Context, account: Account) -> int:
        """Post to an account, and do not say how much."""
        return 1

    @silent.fixture
    def fixture() -> Generator[Json]:
        yield {"account": "cash"}

    @tool(version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=UPDATES)
    def mute(account: Account) -> int:
        """Post to an account, with no way to say how much."""
        return 1

    @mute.preview
    def preview(account: str) -> Preview:
        return Preview()

    silent.compensate(undo)
    mute.compensate(undo)
    async with Interlock.open(tmp_path) as app:
        assert "nothing is stored that could undo" in reason(await offer(app, silent))
        assert "ctx.compensate_with" in reason(await offer(app, mute)), "it did not even have to run"


@pytest.mark.proves("EFFECT-08")
async def test_a_compensation_that_fails_is_a_refusal_too(tmp_path: Path) -> None:
    @tool(version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=UPDATES)
    def post(account: Account) -> int:
        """Post to an account."""
        return 1

    @post.fixture
    def fixture() -> Generator[Json]:
        yield {"account": "cash"}

    @post.compensate
    def undo(account: str, entry: int) -> None:
        raise Failure("E3411", f"{account} is closed, {entry} stays")

    async with Interlock.open(tmp_path) as app:
        assert "fixture undone: cash is closed, 1 stays" in reason(await offer(app, post))


async def test_evidence_counts_for_the_exact_content_it_was_gathered_on(tmp_path: Path) -> None:
    ledger = Ledger()
    post, later = posting(ledger), posting(ledger, "1.0.1")
    async with Interlock.open(tmp_path) as app:
        await app.try_out(post, live=True)
        assert await app.evidence(contract_digest(post)) is not None
        assert await app.evidence(contract_digest(later)) is None
        assert not (await offer(app, later)).admitted
        assert (await offer(app, post)).admitted
    async with Interlock.open(tmp_path) as app:
        assert await app.evidence(contract_digest(post)) is not None


async def test_a_live_trial_that_fails_admits_nothing(tmp_path: Path) -> None:
    @tool(version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=UPDATES)
    async def post(ctx: Context, account: Account) -> bool:
        """Post to an account that is closed."""
        raise Failure("E3411", "the account is closed")

    @post.compensate
    async def undo(entry: bool) -> None:
        """Nothing to undo."""

    async with Interlock.open(tmp_path) as app:
        trial = await app.try_out(post, live=True)
        assert not trial.passed
        assert not (await offer(app, post)).admitted


async def test_an_example_that_fails_is_a_refusal_with_the_reason(tmp_path: Path) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="demo")
    async def balance(account: Account) -> int:
        """Balance of one account."""
        if account == "bank":
            raise Failure("E3411", "there is no bank account")
        return 1

    async with Interlock.open(tmp_path) as app:
        answer = await offer(app, balance)
        assert "example 2" in reason(answer)
        assert "there is no bank account" in reason(answer)
        assert "example 1:" not in reason(answer)


@pytest.mark.supports("TEST-01")
async def test_an_example_whose_result_breaks_the_output_schema_is_a_refusal(tmp_path: Path) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="demo")
    async def balance(account: Account) -> int:
        """Balance of one account."""
        wrong: Any = "a lot"
        return wrong

    async with Interlock.open(tmp_path) as app:
        assert "example 1" in reason(await offer(app, balance))


@pytest.mark.parametrize("late", [1, 2])
async def test_a_read_that_is_late_is_tried_once_more(tmp_path: Path, late: int) -> None:
    """Its first call in a process also loads what it needs, which takes long on a busy machine."""
    calls: list[str] = []

    @tool(version="1.0.0", mutation_class="read_only", namespace="demo", timeout_class="interactive", external_io=False)
    async def balance(account: Account) -> int:
        """Balance of one account."""
        calls.append(account)
        if len(calls) <= late:
            await asyncio.Event().wait()
        return 5

    async with Interlock.open(tmp_path) as app:
        admission = await offer(app, balance)
        assert admission.admitted is (late == 1)
        assert calls == ["cash", "cash", "bank"]


async def test_a_tool_that_crashes_is_refused_and_the_offer_survives(tmp_path: Path) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="demo")
    def balance(account: Account) -> int:
        """Balance of one account."""
        books: dict[str, int] = {}
        return books[account]

    async with Interlock.open(tmp_path) as app:
        assert "KeyError" in reason(await offer(app, balance))


async def test_a_tools_own_check_may_refuse_a_boundary_the_schema_allows(tmp_path: Path) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="demo")
    async def fee(account: Account) -> int:
        """Fee of an account."""
        return 1

    @fee.check
    def known(account: str) -> list[str]:
        return [] if account in ("cash", "bank") else [f"no account `{account}`"]

    async with Interlock.open(tmp_path) as app:
        assert (await offer(app, fee)).admitted


# The cases of a contract

BOUNDS = pytest.mark.part_of(
    "TEST-01",
    rest="a run of the tool with the values at its bounds, which are validated only; cases for fields inside objects,"
    " items of arrays and alternatives (anyOf), and for a maxLength of 100,000 or more; an accepted case for a pattern",
)


def contract(properties: Json, required: list[str], **more: Any) -> Contract:
    return parse_contract(
        {
            "tool_id": "transfer",
            "version": "1.0.0",
            "name": "Transfer",
            "description": "Moves an amount between accounts.",
            "provider": "local",
            "protocol": "native",
            "parameters": {"type": "object", "properties": properties, "required": required},
            "result_schema": {"type": "boolean"},
            "required_permissions": [],
            "timeout_class": "standard",
            "idempotency": {},
            "observability": {},
            "mutation_class": "read_only",
        }
        | more
    )


@BOUNDS
def test_a_contract_implies_exactly_these_cases() -> None:
    fixture = contract(
        {
            "account": {"type": "string", "examples": ["cash", "bank"], "minLength": 2, "maxLength": 5},
            "cents": {"type": "integer", "examples": [250], "minimum": 1, "maximum": 1000},
            "rate": {"type": "number", "examples": [1.5], "multipleOf": 0.5},
            "speed": {"enum": ["slow", "fast"], "examples": ["slow"]},
            "code": {"type": "string", "pattern": "^[A-Z]+$", "examples": ["ABC"]},
        },
        ["account", "cents"],
    )
    base: Json = {"account": "cash", "cents": 250, "rate": 1.5, "speed": "slow", "code": "ABC"}
    expected: list[tuple[str, Json, str]] = [
        ("example 1", base, "example"),
        ("example 2", base | {"account": "bank"}, "example"),
        ("missing account", {"cents": 250, "rate": 1.5, "speed": "slow", "code": "ABC"}, "refused"),
        ("missing cents", {"account": "cash", "rate": 1.5, "speed": "slow", "code": "ABC"}, "refused"),
        ("undeclared field", base | {"undeclared_field": 1}, "refused"),
        ("account not of type string", base | {"account": {"not": "text"}}, "refused"),
        ("account at maxLength", base | {"account": "xxxxx"}, "accepted"),
        ("account beyond maxLength", base | {"account": "xxxxxx"}, "refused"),
        ("account at minLength", base | {"account": "xx"}, "accepted"),
        ("account below minLength", base | {"account": "x"}, "refused"),
        ("cents not of type integer", base | {"cents": "x"}, "refused"),
        ("cents at minimum", base | {"cents": 1}, "accepted"),
        ("cents beyond minimum", base | {"cents": 0}, "refused"),
        ("cents at maximum", base | {"cents": 1000}, "accepted"),
        ("cents beyond maximum", base | {"cents": 1001}, "refused"),
        ("rate not of type number", base | {"rate": "x"}, "refused"),
        ("rate a multiple", base | {"rate": 1.0}, "accepted"),
        ("rate between multiples", base | {"rate": 1.25}, "refused"),
        ("speed equal to 'slow'", base, "accepted"),
        ("speed equal to 'fast'", base | {"speed": "fast"}, "accepted"),
        ("speed outside the enumeration", base | {"speed": "\u2205 none of them"}, "refused"),
        ("code not of type string", base | {"code": {"not": "text"}}, "refused"),
        ("code of the wrong form", base | {"code": "\u2205 not of that form"}, "refused"),
    ]
    assert [(case.name, case.input, case.expect) for case in cases_of(fixture)] == expected


def test_what_is_made_of_some_fields_and_does_not_fit_is_no_example() -> None:
    def said(**fields: Json) -> list[Json]:
        parts = {name: {"type": "string", "description": "a text", **part} for name, part in fields.items()}
        return [case.input for case in cases_of(contract(parts, ["a", "b"])) if case.expect == "example"]

    assert said(a={"examples": ["x"]}, b={}) == [], "`b` must be there, and nobody has said what it may be"
    assert said(a={"examples": ["x"]}, b={"examples": ["y", "too long"], "maxLength": 3}) == [{"a": "x", "b": "y"}]


@BOUNDS
def test_whole_examples_of_the_author_go_before_made_ones() -> None:
    said = contract(
        {"account": {"type": "string", "description": "account", "examples": ["cash"]}},
        ["account"],
        examples=[{"account": "till"}, {"account": "safe"}],
    )
    assert [case.input for case in cases_of(said) if case.expect == "example"] == [
        {"account": "till"},
        {"account": "safe"},
    ]


@BOUNDS
async def test_a_mutating_tool_also_gets_a_duplicate_key_case(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        trial = await app.try_out(with_preview(Ledger()))
        names = [outcome.case for outcome in trial.outcomes]
        assert [name for name in names if "again" in name] == [
            "example 1 again under its key",
            "example 2 again under its key",
        ]


def _lied_to(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that does not keep what a duplicate key promises."""
    invoke, calls = Gateway.invoke, itertools.count()

    async def breaks(self: Gateway, request: Request) -> Result:
        if how == "runs twice" and request.operation == "invoke":
            request = replace(request, key=f"{request.key}-{next(calls)}")
        result = await invoke(self, request)
        return replace(result, value="other data") if how == "other data" and result.replayed else result

    monkeypatch.setattr(Gateway, "invoke", breaks)


@BOUNDS
@pytest.mark.parametrize(("how", "runs"), [("keeps", 1), ("other data", 1), ("runs twice", 2)])
async def test_the_duplicate_key_case_demands_equal_data_and_one_mutation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, runs: int
) -> None:
    ledger = Ledger()
    async with Interlock.open(tmp_path) as app:
        _lied_to(how, monkeypatch)
        trial = await app.try_out(posting(ledger), live=True)
    left = len(ledger.posted) + len(ledger.undone)
    assert left == 2 * runs, "for each of the two examples"
    again = [outcome for outcome in trial.outcomes if outcome.case == "example 1 again under its key"]
    assert [outcome.passed for outcome in again] == [how == "keeps"]
    assert trial.passed == (how == "keeps")


@BOUNDS
@pytest.mark.parametrize("answer", [None, Failure("E3502"), Failure("E3206"), Failure("E3401")])
async def test_a_bad_input_must_be_refused_and_as_invalid_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Failure | None
) -> None:
    async def checked(self: Gateway, request: Request) -> None:
        if answer is not None:
            raise answer

    async with Interlock.open(tmp_path) as app:
        fair = await app.try_out(with_preview(Ledger()))
        refused = {outcome.case for outcome in fair.outcomes if outcome.case.endswith(("missing", "beyond maxLength"))}
        assert fair.passed
        assert refused
        monkeypatch.setattr(Gateway, "checked", checked)
        trial = await app.try_out(with_preview(Ledger()))
    failed = {outcome.case for outcome in trial.outcomes if outcome.message == "was not refused"}
    assert refused <= failed
    assert not trial.passed


# The rule that a case breaks, by how its name ends.
RULES = {
    "beyond maxLength": "maxLength",
    "below minLength": "minLength",
    "beyond minimum": "minimum",
    "beyond maximum": "maximum",
    "beyond exclusiveMinimum": "exclusiveMinimum",
    "beyond exclusiveMaximum": "exclusiveMaximum",
    "between multiples": "multipleOf",
    "outside the enumeration": "enum",
    "other than the constant": "const",
    "of the wrong form": "pattern",
    "with too few items": "minItems",
}


def rule_of(case: Case) -> tuple[list[str], str]:
    """Where and by which rule a case must be refused."""
    if case.name.startswith("missing "):
        return [], "required"
    if case.name == "undeclared field":
        return [], "additionalProperties"
    where, _, words = case.name.partition(" ")
    return [where], "type" if words.startswith("not of type") else RULES[words]


texts = st.fixed_dictionaries(
    {"type": st.just("string"), "examples": st.just(["abc"])},
    optional={
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(3, 9),
        "pattern": st.sampled_from(["^[a-z]+$", "b", "^abc$"]),
    },
)
numbers = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"]), "examples": st.just([12])},
    optional={
        "minimum": st.integers(-5, 12),
        "maximum": st.integers(12, 30),
        "exclusiveMinimum": st.integers(-5, 11),
        "exclusiveMaximum": st.integers(13, 30),
        "multipleOf": st.sampled_from([1, 2, 3, 4, 6]),
    },
)
choices = st.one_of(
    st.just({"enum": ["a", "b"], "examples": ["a"]}),
    st.just({"type": "integer", "enum": [1, 2], "examples": [1]}),
    st.just({"type": "string", "const": "a", "examples": ["a"]}),
    st.just({"type": "boolean", "examples": [True]}),
    st.just({"type": "array", "items": {"type": "string"}, "minItems": 1, "examples": [["a"]]}),
)
fields = st.dictionaries(st.sampled_from(["one", "two", "three"]), st.one_of(texts, numbers, choices), min_size=1)


@BOUNDS
@settings(max_examples=150, deadline=None)
@given(properties=fields, data=st.data())
def test_valid_cases_validate_and_invalid_ones_fail_for_the_named_reason_only(properties: Json, data: Any) -> None:
    required = data.draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    generated = contract(properties, required)
    schema = Schema(generated.input.model_facing)
    for case in cases_of(generated):
        errors = schema.errors(coerce(schema, case.input).value)
        broken = [(list(error.instance_path), error.kind.name) for error in errors]
        assert broken == ([] if case.expect != "refused" else [rule_of(case)]), case


@pytest.mark.supports("TEST-01")
async def test_the_author_is_told_where_a_result_is_not_what_was_promised(tmp_path: Path) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="demo")
    async def fee(account: Account) -> dict[str, int]:
        """Fee for posting to an account."""
        late: Any = {"fee": "nothing"}
        return late

    async with Interlock.open(tmp_path) as app:
        words = reason(await offer(app, fee))
        assert "example 1: demo.fee@1.0.0 returned something its contract does not allow" in words
        assert '/fee is not of type "integer"; it is text' in words
        assert "nothing" not in words
        trial = await app.try_out(fee)
        assert 'is not of type "integer"; it is text' in trial.outcomes[0].message


async def test_the_author_is_told_which_effect_could_not_be_confirmed(tmp_path: Path) -> None:
    ledger = Ledger()
    post = posting(ledger)

    @post.verify
    async def verify(arguments: Json, result: Json) -> list[str]:
        return ["the account was not touched"]

    @post.fixture
    @contextmanager
    def fixture() -> Generator[Json]:
        yield {"account": "cash", "cents": 1}

    async with Interlock.open(tmp_path) as app:
        assert "verify the account was not touched" in reason(await offer(app, post))


# Known pairs


def doubler(wrong: bool = False, **options: Any) -> AnyTool:
    @tool(version="1.0.0", mutation_class="read_only", namespace="demo", **options)
    async def double(cents: Cents) -> int:
        """Twice an amount of money."""
        return cents * (3 if wrong else 2)

    return double


@pytest.mark.proves("TEST-09")
async def test_a_tool_whose_known_pair_does_not_hold_is_refused(tmp_path: Path) -> None:
    pairs = [{"input": {"cents": 4}, "output": 8}, {"input": {"cents": 5}, "output": 10}]
    async with Interlock.open(tmp_path) as app:
        answer = await offer(app, doubler(wrong=True, known_pairs=pairs))
        assert "known pair 1: gave `12` instead of `8`" in reason(answer)
        answer = await offer(app, doubler(known_pairs=pairs))
        assert answer.admitted
        assert answer.trial is not None
        assert [one.case for one in answer.trial.outcomes if "pair" in one.case] == ["known pair 1", "known pair 2"]


@pytest.mark.proves("TEST-09")
async def test_a_changed_tool_is_held_to_its_pairs_again(tmp_path: Path) -> None:
    pairs = [{"input": {"cents": 4}, "output": 8}]
    async with Interlock.open(tmp_path) as app:
        assert (await offer(app, doubler(known_pairs=pairs))).admitted

        @tool(version="1.0.1", mutation_class="read_only", namespace="demo", known_pairs=pairs)
        async def double(cents: Cents) -> int:
            """Twice an amount of money."""
            return cents + 2

        answer = await offer(app, double)
        assert "known pair 1: gave `6` instead of `8`" in reason(answer)
        assert (await app.catalog.resolve("demo.double")).row.version == "1.0.0"


@pytest.mark.proves("TEST-09")
async def test_a_writing_tool_runs_its_pairs_in_its_fixture_and_without_one_is_refused(tmp_path: Path) -> None:
    def saver(fixture: bool, output: int) -> AnyTool:
        @tool(
            version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=UPDATES,
            known_pairs=[{"input": {"account": "cash", "cents": 4}, "output": output}],
        )  # fmt: skip
        async def save(ctx: Context, account: Account, cents: Cents) -> int:
            """Put money aside."""
            ctx.effect(f"account:{account}", "UPDATE")
            return cents

        @save.preview
        def _(account: str, cents: int) -> Preview:
            return Preview(impact=account)

        def prepared() -> Generator[Json]:
            yield {"account": "cash", "cents": 1}

        if fixture:
            save.fixture(prepared)
        return save

    async with Interlock.open(tmp_path) as app:
        assert "known pair 1: a tool that writes runs its pairs inside" in reason(await offer(app, saver(False, 4)))
        assert "known pair 1: gave `4` instead of `5`" in reason(await offer(app, saver(True, 5)))
        assert (await offer(app, saver(True, 4))).admitted
