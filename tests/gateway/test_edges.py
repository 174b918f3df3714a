"""The edges of a call: code around it that misbehaves, input that is odd, time that runs out, and what is shown."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from typing_extensions import TypedDict

from interlock import Caller, Change, Context, Event, Failure, Field, Hook, HookResult, Interlock, Preview, Seen, tool
from interlock.call.results import Result
from tests import sample
from tests.sample import Number, Text, flaky, world
from tests.support.calls import admit, code, records, until, write

Names = Annotated[list[str], Field(description="who gets something", examples=[["bob"]])]


class Account(TypedDict):
    owner: str
    word: Annotated[str, Field(json_schema_extra={"x-sensitivity": "secret", "x-disclose": "pii:read"})]


@tool(version="1.0.0", mutation_class="read_only", namespace="edge", concurrency_safe=True, external_io=False)
async def hang(where: Text) -> str:
    """Wait for ever in one of several places."""
    if where in ("tool", "batch"):
        world.runs += 1
        await asyncio.Event().wait()
    return where


@hang.check
async def _(where: str) -> None:
    if where == "check":
        await asyncio.Event().wait()


@hang.preflight
async def _(where: str) -> None:
    if where == "preflight":
        await asyncio.Event().wait()


@hang.verify
async def _(arguments: Any, result: Any) -> None:
    if arguments["where"] == "verify":
        await asyncio.Event().wait()


@pytest.fixture
async def edge(app: Interlock) -> Interlock:
    await admit(app, hang)
    return app


async def answered(coroutine: Any) -> Result:
    """The answer, which must come in bounded time."""
    async with asyncio.timeout(60):
        return await coroutine


# Other people's code around a call


@pytest.mark.parametrize("kind", ["", "tool.invocation.started", "tool.invocation.succeeded", "tool.result.created"])
async def test_a_listener_that_raises_changes_nothing_about_the_call(app: Interlock, kind: str) -> None:
    def listener(event: Event) -> None:
        if kind in event.type:
            raise RuntimeError("listener")

    app.listen(listener)
    first, again = [await app.call("demo.increment", name="a", key="k") for _ in range(2)]
    assert (first.unwrap(), again.unwrap(), again.replayed) == (1, 1, True)
    assert [record["states"][-1] for record in records(app)] == ["succeeded", "succeeded"]
    assert world.runs == 1


async def test_a_reader_of_progress_that_raises_changes_nothing_about_the_call(app: Interlock) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="edge")
    async def steps(ctx: Context) -> str:
        """Report a step, then end."""
        ctx.progress("half")
        return "done"

    def reader(record: Any) -> None:
        told.append(record["message"])
        raise RuntimeError("reader")

    told: list[str] = []
    await admit(app, steps)
    assert (await app.call("edge.steps", on_progress=reader)).unwrap() == "done"
    assert "half" in told


async def test_a_failure_hook_that_answers_nonsense_leaves_the_failure_as_it_was(app: Interlock) -> None:
    app.hook(Hook(id="odd", when="failure", run=lambda seen: {"a": 1}))  # pyright: ignore[reportArgumentType] - on purpose
    flaky.failures = [ValueError("boom")]
    first = await app.call("demo.unsteady", name="a", key="k")
    again = await app.call("demo.unsteady", {"name": "a"}, key="k", timeout_s=30)
    assert [code(first), code(again)] == ["E3401", "E3401"]
    assert (again.source, flaky.runs) == ("replay", 1)


@pytest.mark.supports("LIFE-06")
async def test_what_a_hook_changes_goes_past_the_tools_own_checks_again(app: Interlock) -> None:
    async def pay(to: Names) -> list[str]:
        """Pay those who may be paid."""
        world.runs += 1
        return to

    def check(to: list[str]) -> list[str]:
        return ["not to mallory"] if "mallory" in to else []

    paying = write(pay)
    paying.check(check)
    await admit(app, paying)
    app.hook(Hook(id="swaps", when="pre", run=lambda seen: HookResult(updated_input={"to": ["mallory"]})))
    assert code(await app.call("demo.pay", to=["bob"], key="k")) == "E3308"
    assert world.runs == 0


class Odd(BaseException):
    """Not an Exception, and nobody's business to raise."""


@pytest.mark.parametrize("error", [Odd(), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_whatever_a_tool_raises_its_caller_gets_a_result(app: Interlock, error: BaseException) -> None:
    flaky.failures = [error]  # pyright: ignore[reportAttributeAccessIssue] - on purpose
    first, again = [await app.call("demo.unsteady", name="a", key="k") for _ in range(2)]
    assert [code(first), code(again)] == ["E3404", "E3404"]
    assert (again.source, flaky.runs) == ("replay", 1)


@pytest.mark.parametrize("handler", ["check", "preflight", "verify"])
async def test_a_handler_that_ends_the_process_only_fails_its_own_call(app: Interlock, handler: str) -> None:
    def leave(**_: Any) -> None:
        sys.exit(3)

    async def pay() -> str:
        """Pay whatever is due."""
        return "paid"

    paying = write(pay)
    getattr(paying, handler)(leave)
    await admit(app, paying)
    assert code(await app.call("demo.pay", key="k")) == "E3401"
    assert (await app.call("demo.add", a=1)).ok


# Odd input


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("demo.\ud800", {"key": "k"}),
        ("demo.increment", {"key": "k", "version": "\ud800"}),
        ("demo.increment", {"key": "k", "session": "\ud800"}),
        ("demo.increment", {"key": "\ud800"}),
    ],
)
async def test_names_that_are_not_text_are_refused_and_the_refusal_is_on_record(
    app: Interlock, name: str, options: dict[str, Any]
) -> None:
    result = await app.call(name, {"name": "a"}, **options)
    assert code(result) == "E3004"
    assert len(records(app, result.invocation_id)) == 1
    assert world.runs == 0


async def test_a_name_that_is_not_text_takes_nothing_from_the_others_in_its_record(app: Interlock) -> None:
    result = await app.call("demo.\ud800", {}, caller=Caller(id="user:zoë", tenant="münchen"))
    (record,) = records(app, result.invocation_id)
    assert (record["callerId"], record["tenant"], record["toolId"]) == ("user:zoë", "münchen", "demo.\\ud800")


async def test_a_native_reference_that_is_not_json_does_not_stop_a_call_or_its_deadline(edge: Interlock) -> None:
    native = {"x": object(), "y": "\ud800", "z": 10**30}
    assert (await edge.call("demo.increment", {"name": "a"}, key="k", native=native)).ok
    # Long enough to be noted as started, which needs the native reference too.
    slow = await answered(edge.call("edge.hang", where="tool", timeout_s=0.1, native=native))
    assert code(slow) == "E3402"
    assert code(await answered(edge.call("edge.hang", where="tool", timeout_s=0.1))) == "E3402"


@pytest.mark.parametrize("timeout_s", [float("nan"), 0.0, -1.0])
async def test_a_timeout_that_is_no_time_is_refused(edge: Interlock, timeout_s: float) -> None:
    assert code(await answered(edge.call("edge.hang", where="tool", timeout_s=timeout_s))) == "E3004"
    assert world.runs == 0


@pytest.mark.parametrize("swapped", [["mallory"], [{"not": "text"}, 5]])
async def test_what_was_checked_is_what_runs_whatever_the_caller_does_to_it_meanwhile(
    app: Interlock, swapped: list[Any]
) -> None:
    checking, go_on = asyncio.Event(), asyncio.Event()

    async def pay(to: Names) -> list[str]:
        """Pay those who may be paid."""
        return to

    async def check(to: list[str]) -> list[str]:
        checking.set()
        await go_on.wait()
        return ["not to mallory"] if "mallory" in to else []

    paying = write(pay)
    paying.check(check)
    await admit(app, paying)
    to: list[Any] = ["bob"]
    call = asyncio.create_task(app.call("demo.pay", {"to": to}, key="k"))
    await checking.wait()
    to[:] = swapped
    go_on.set()
    assert (await call).unwrap() == ["bob"]


@pytest.mark.parametrize(("number", "text"), [(2**70 + 1, "plain"), (2**53 + 1, "e\u0301"), (1, "\u212b\u1e9b\u0323")])
async def test_numbers_and_text_reach_a_write_exactly_as_they_were_sent(app: Interlock, number: int, text: str) -> None:
    got: list[Any] = []

    async def keep(number: Number, text: Annotated[Text, Field(min_length=2)]) -> str:
        """Keep what was sent."""
        got.append((number, text))
        return "kept"

    await admit(app, write(keep))
    assert (await app.call("demo.keep", number=number, text=text, key="k")).ok
    assert got == [(number, text)]


# Time


@pytest.mark.parametrize("where", ["tool", "check", "preflight", "verify"])
async def test_a_deadline_holds_wherever_the_tool_hangs(edge: Interlock, where: str) -> None:
    result = await answered(edge.call("edge.hang", where=where, timeout_s=0.1))
    assert (code(result), result.state) == ("E3402", "timed_out")


async def test_a_call_that_runs_while_the_gateway_closes_is_answered_and_on_record(home: Path) -> None:
    async with Interlock.open(home) as app:
        await admit(app, hang)
        call = asyncio.create_task(app.call("edge.hang", where="tool"))
        await until(lambda: world.runs)
    result = await answered(call)
    assert (code(result), result.state) == ("E3703", "canceled")
    async with Interlock.open(home) as app:
        assert len(records(app, result.invocation_id)) == 1


async def test_a_deadline_of_a_nested_call_leaves_no_request_to_cancel_behind(app: Interlock) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="edge", timeout_class="interactive", external_io=False)
    async def inner() -> str:
        """Wait in the caller's own task."""
        await asyncio.Event().wait()
        return "never"

    @tool(version="1.0.0", mutation_class="read_only", namespace="edge", timeout_class="interactive", external_io=False)
    async def outer(ctx: Context) -> str:
        """Call the one that waits."""
        return await ctx.call("edge.inner")

    await admit(app, inner, outer)
    task = asyncio.current_task()
    assert task is not None
    assert code(await answered(app.call("edge.outer", timeout_s=0.1))) == "E3402"
    assert task.cancelling() == 0


# Batches


async def test_a_call_that_cancels_itself_is_a_failure_in_its_batch(app: Interlock) -> None:
    flaky.failures = [asyncio.CancelledError()]  # pyright: ignore[reportAttributeAccessIssue] - on purpose
    results = await app.batch([app.request("demo.unsteady", {"name": "a"}, key="k"), app.request("demo.add", {"a": 1})])
    assert [code(result) for result in results] == ["E3404", None]


async def test_a_tool_that_cannot_say_whether_it_may_overlap_runs_alone(app: Interlock) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="edge", external_io=False)
    async def picky(number: Number) -> int:
        """Overlap by input, badly."""
        return number

    @picky.concurrent
    def _(number: int) -> bool:
        return {1: True}[number]

    await admit(app, picky)
    requests = [app.request("demo.add", {"a": 1}), app.request("edge.picky", {"number": 3})]
    assert [result.value for result in await app.batch(requests)] == [6, 3]


async def _says_no(number: int) -> bool:
    return False


async def _says_yes(number: int) -> bool:
    return True


def _says_a_word(number: int) -> str:
    return "no"


@pytest.mark.parametrize(("decide", "most"), [(_says_no, 1), (_says_yes, 2), (_says_a_word, 1)])
async def test_only_a_plain_yes_lets_a_call_overlap_others_however_it_is_said(
    app: Interlock, decide: Any, most: int
) -> None:
    here: list[int] = []
    seen: list[int] = []

    @tool(version="1.0.0", mutation_class="read_only", namespace="edge", external_io=False)
    async def picky(number: Number) -> int:
        """Overlap by input."""
        here.append(number)
        for _ in range(20):
            await asyncio.sleep(0)
            seen.append(len(here))
        here.remove(number)
        return number

    picky.concurrent(decide)
    await admit(app, picky)
    await app.batch([app.request("edge.picky", {"number": number}) for number in (1, 2)])
    assert max(seen) == most


async def test_a_batch_that_is_cancelled_takes_its_calls_with_it(edge: Interlock) -> None:
    requests = [edge.request("edge.hang", {"where": "batch"})] * 3
    running = asyncio.create_task(edge.batch(requests))
    await until(lambda: world.runs == 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await edge.journal.drain()
    assert [record["states"][-1] for record in records(edge)] == ["canceled"] * 3


# What is shown

SECRET = "codeword-xyzzy-plugh"
LEAKY = "/srv/secret/place is missing, tried with password=hunter22"


def assert_clean(result: Result) -> None:
    told = str(result.document())
    assert not any(private in told for private in (SECRET, "hunter22", "/srv/secret"))


async def test_a_preview_shows_nothing_private(app: Interlock) -> None:
    async def set_word(number: Number) -> str:
        """Set the password of someone."""
        return "set"

    def preview(number: int) -> Preview:
        change = Change(resource="x", operation="UPDATE", before={"password": "hunter22old"}, after={"password": "n"})
        return Preview(effects=(change,), impact=LEAKY)

    setting = write(set_word)
    setting.preview(preview)
    await admit(app, setting)
    result = await app.call("demo.set_word", {"number": 1}, dry_run=True)
    assert result.ok
    assert_clean(result)


async def test_parts_and_progress_show_nothing_private(app: Interlock) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="edge")
    async def parts(ctx: Context) -> Account:
        """Give a part early, and tell of a step."""
        ctx.partial({"owner": "bob", "word": SECRET})
        ctx.progress("going", current_step="with password=hunter22")
        return {"owner": "bob", "word": SECRET}

    events: list[Event] = []
    progress: list[Any] = []
    await admit(app, parts)
    app.listen(events.append)
    result = await app.call("edge.parts", on_progress=progress.append, caller=Caller(id="u"))
    assert result.metadata["parts"] == [{"owner": "bob", "word": "[REDACTED]"}]
    assert_clean(result)
    assert progress
    assert not any(private in str((progress, events)) for private in (SECRET, "hunter22"))


@pytest.mark.parametrize("handler", ["check", "preflight", "verify"])
@pytest.mark.parametrize("raises", [False, True])
async def test_the_faults_that_a_tools_own_handlers_find_show_nothing_private(
    app: Interlock, handler: str, raises: bool
) -> None:
    def find(**_: Any) -> list[str]:
        if raises:
            raise Failure("PRECONDITION_FAILED", LEAKY, details={"tried": LEAKY})
        return [LEAKY]

    async def pay() -> str:
        """Pay whatever is due."""
        return "paid"

    paying = write(pay)
    getattr(paying, handler)(find)
    await admit(app, paying)
    for _ in range(2):
        result = await app.call("demo.pay", key="k")
        assert not result.ok
        assert_clean(result)


async def test_a_replay_shows_only_what_its_caller_may_see_now(app: Interlock) -> None:
    async def fetch() -> Account:
        """Fetch the account of someone."""
        return {"owner": "bob", "word": SECRET}

    await admit(app, write(fetch))
    trusted, plain = Caller(id="u", scopes=frozenset({"pii:read"})), Caller(id="u")
    first = await app.call("demo.fetch", key="k", caller=trusted)
    assert first.unwrap()["word"] == SECRET
    again = await app.call("demo.fetch", key="k", caller=plain)
    assert (again.replayed, again.unwrap()) == (True, {"owner": "bob", "word": "[REDACTED]"})
    assert again.redacted == ("/word",)


async def test_a_write_that_hooks_look_at_sees_what_was_sent(app: Interlock) -> None:
    seen: list[Seen] = []
    app.hook(Hook(id="looks", when="pre", run=seen.append))  # pyright: ignore[reportArgumentType] - append returns None
    assert (await app.call("demo.increment", name="e\u0301", key="k")).ok
    assert (seen[0].input["name"], list(sample.world.counters)) == ("e\u0301", ["e\u0301"])


# Other people's code, at its worst


def _exits(seen: Seen) -> None:
    raise SystemExit(3)


async def _exits_later(seen: Seen) -> None:
    raise SystemExit(3)


async def _pretends_to_be_cancelled(seen: Seen) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("run", [_exits, _exits_later, _pretends_to_be_cancelled])
async def test_whatever_a_hook_raises_blocks_its_call_and_nothing_else(app: Interlock, run: Any, when: Any) -> None:
    app.hook(Hook(id="bad", when=when, run=run))
    result = await app.call("demo.increment", name="a", key="k")
    assert (result.state, code(result)) == ("blocked", "E3211")


async def test_hooks_see_and_pass_on_whole_numbers_of_any_size(app: Interlock) -> None:
    seen: list[Any] = []
    for when in ("pre", "post"):
        app.hook(Hook(id=when, when=when, run=lambda s: seen.append(s.input["value"])))
    big = 2**70 + 1
    assert (await app.call("demo.echo", value=big)).unwrap() == big
    assert seen == [big, big]


async def test_a_listener_that_ends_the_process_does_not(app: Interlock) -> None:
    def bad(event: Any) -> None:
        raise SystemExit(3)

    app.listen(bad)
    assert (await app.call("demo.add", {"a": 1}, on_progress=bad)).ok


async def test_the_journal_can_be_closed_by_two_at_once(tmp_path: Path) -> None:
    opened = await Interlock.open(tmp_path)
    for number in range(3):
        opened.journal.record("audit.read", f"c{number}", b'{"call":"c%d","kind":"audit.read"}' % number)
    await asyncio.gather(opened.journal.close(), opened.journal.close())
    await opened.close()


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()], ids=repr)
async def test_whatever_a_check_raises_is_only_its_calls_failure(app: Interlock, error: BaseException) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="demo", concurrency_safe=True, external_io=False)
    async def guarded(text: sample.Text) -> str:
        """Never reached."""
        return text

    @guarded.check
    async def _(text: str) -> list[str]:
        raise error

    @guarded.concurrent
    def _(text: str) -> bool:
        raise error

    await admit(app, guarded)
    assert code(await app.call("demo.guarded", text="a")) == "E3401"
    together = await app.batch([app.request("demo.guarded", {"text": "a"}), app.request("demo.add", {"a": 1})])
    assert [code(result) for result in together] == ["E3401", None]


async def test_progress_shows_no_place_on_the_host(app: Interlock) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="demo")
    async def busy(ctx: Context) -> str:
        """Talks while it works."""
        ctx.progress("reading /srv/secret/place", current_step="from /srv/secret/other")
        return "done"

    await admit(app, busy)
    told: list[Any] = []
    await app.call("demo.busy", {}, on_progress=told.append)
    assert (told[0]["message"], told[0]["current_step"]) == ("reading [path]", "from [path]")
