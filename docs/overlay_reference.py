"""The page of overlay fields: every field of the models that read an overlay, with its type, default and an example.

Types and defaults are taken from the models. The words and the examples are here; the tests read every example with the
parser of overlays, and a field without words cannot be left out: the page is then not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import orjson
import pydantic
import pydantic_core
from pydantic.fields import FieldInfo

from interlock.contract.manifest import Approval, ApprovalStep, Effect
from interlock.contract.recipes import Constant, InText, Step, Undo
from interlock.upstreams.conditions import IfMatch
from interlock.upstreams.overlay import OF_ONE, Overlay, ParameterOverlay, ToolOverlay

# Each part of an overlay: its heading, its model, where it stands (`…` is the place of an example), and the fields with
# their words and an example in YAML.
Words = dict[str, tuple[str, str]]
PARTS: tuple[tuple[str, type[pydantic.BaseModel], str, str, Words], ...] = (
    (
        "The file",
        Overlay,
        "…",
        "An overlay is one YAML or JSON document.",
        {
            "defaults": (
                (
                    "the statements about all tools, where their own entry says nothing: the fields of a tool that are"
                    " not marked *one tool only*"
                ),
                "defaults: {timeout_default: 60}",
            ),
            "tools": (
                "the statements about each tool, by the upstream's own name for it",
                "tools: {list_issues: {mutation_class: read_only}}",
            ),
        },
    ),
    (
        "A tool",
        ToolOverlay,
        "tools: {it: {…}}",
        (
            "Everything that can be stated of one tool. Where nothing is stated, the upstream's word or the safe value"
            " applies."
        ),
        {
            "mutation_class": (
                (
                    "what a call does; without it the tool counts as `write_irreversible`, unless hints were accepted."
                    " `write_reversible` needs `undo`"
                ),
                "mutation_class: read_only",
            ),
            "effects": (
                "the resources that a call changes; without them, the tool itself",
                'effects: [{resource: "repo:{owner}/{repo}", operation: CREATE}]',
            ),
            "timeout_class": ("how its time is limited; it follows from `timeout_default`", "timeout_class: async"),
            "timeout_default": ("the time of a call in seconds; 30 without it", "timeout_default: 120"),
            "timeout_max": ("the longest time in seconds that a caller may ask for", "timeout_max: 600"),
            "required_scopes": ("the scopes that a caller must hold", "required_scopes: [github]"),
            "approval": ("who is asked if a person must agree, see below", "approval: {timeout_seconds: 3600}"),
            "restart_safe": ("that it may run again after a call of unknown outcome", "restart_safe: true"),
            "idempotent_by_key": (
                "that the upstream takes the idempotency key, and acts once under it",
                "idempotent_by_key: true",
            ),
            "idempotency": (
                (
                    "where the idempotency key of a write comes from; `caller` without it"
                    " ([explained](../how-to/overlays.md#where-idempotency-keys-come-from))"
                ),
                "idempotency: request",
            ),
            "undo": (
                "how a write is undone, see below",
                "undo: {tool: delete_issue, arguments: {id: /result/structuredContent/id}, example: {title: a trial}}",
            ),
            "if_match": (
                (
                    "that a write of an HTTP service is for the version that was read, see below"
                    " ([explained](../how-to/overlays.md#writes-for-the-version-that-was-read))"
                ),
                "if_match: {argument: seen, read_by: get_document}",
            ),
            "concurrency_safe": (
                "that calls of a batch may run beside others, together with `isolated_calls`",
                "concurrency_safe: true",
            ),
            "isolated_calls": ("that calls do not see one another's work at the upstream", "isolated_calls: true"),
            "tags": ("words that policies and searches can use", "tags: [personal-data]"),
            "max_inline_chars": (
                "the length from which a result is stored, and referred to; 25,000 without it",
                "max_inline_chars: 50000",
            ),
            "max_result_bytes": ("the size from which a result is refused", "max_result_bytes: 1000000"),
            "private_output": (
                "that results are stored and referred to, whatever their size: no answer and no transcript holds them",
                "private_output: true",
            ),
            "estimated_cost": ("the cost of a call, for budgets", "estimated_cost: 0.02"),
            "stale_s": (
                (
                    "that a read may be answered with a stored answer of up to this age in seconds while the upstream"
                    " does not answer; it is marked"
                ),
                "stale_s: 300",
            ),
            "closed": (
                (
                    "that arguments which its input schema does not declare are refused where it says nothing of them;"
                    " without it they are let in, as JSON Schema has it"
                ),
                "closed: true",
            ),
            "off_schema": (
                (
                    "what becomes of a result that does not fit its schema: `error`, which applies without it, or"
                    " `warn`, which passes it on with a warning"
                ),
                "off_schema: warn",
            ),
            "hide": ("that the tool is not served", "hide: true"),
            "rename": ("its name in Interlock, after the name of the upstream", "rename: find_issues"),
            "title": ("its title in lists", "title: Find issues"),
            "description": (
                "its description, 10 to 2,000 characters, in place of the upstream's",
                "description: Finds issues by words in their titles.",
            ),
            "search_hint": ("words by which it is found", "search_hint: bugs tickets"),
            "parameters": (
                "statements about its parameters, by name, see below",
                "parameters: {path: {kind: path}}",
            ),
            "result_schema": (
                "the JSON Schema of its result, in place of the upstream's",
                "result_schema: {type: object, properties: {id: {type: integer}}}",
            ),
            "examples": ("inputs that the contract tests use", "examples: [{query: lamp}]"),
        },
    ),
    (
        "A parameter",
        ParameterOverlay,
        "tools: {it: {parameters: {name: {…}}}}",
        "Statements about one parameter of a tool.",
        {
            "description": ("its description, in place of the upstream's", "description: The text of the issue"),
            "kind": (
                "what its texts are, so that rules see paths, hosts and programs in normal form",
                "kind: path",
            ),
            "sensitivity": ("what it holds, so that it is redacted", "sensitivity: pii"),
            "examples": ("values that the contract tests use", "examples: [lamp, chair]"),
        },
    ),
    (
        "A version that was read",
        IfMatch,
        "tools: {it: {if_match: {…}}}",
        "The version that a write is for, sent as `If-Match`.",
        {
            "argument": (
                "the argument that holds it; it is added to the tool, unless it is its own header `If-Match`",
                "argument: seen",
            ),
            "read_by": ("the tool whose results have the version, by the upstream's name", "read_by: get_document"),
            "required": ("that a write without a version is refused", "required: true"),
        },
    ),
    (
        "An effect",
        Effect,
        "tools: {it: {effects: [{…}]}}",
        "One change that a call may make.",
        {
            "resource": ("what is changed; `{name}` is an argument of the call", 'resource: "repo:{owner}/{repo}"'),
            "operation": ("what is done to it", "operation: DELETE"),
            "scope": ("how far it reaches: `resource`, or a wider word such as `system`", "scope: system"),
        },
    ),
    (
        "Approval",
        Approval,
        "tools: {it: {approval: {…}}}",
        "Who is asked for a call that needs a person, and what happens if nobody answers.",
        {
            "timeout_seconds": ("the time after which no answer counts as a denial", "timeout_seconds: 3600"),
            "escalation_fraction": (
                "the part of the time after which the next group is asked, where a step says no time of its own",
                "escalation_fraction: 0.25",
            ),
            "chain": ("the groups that are asked, one after the other", "chain: [{group: approvers}, {group: admins}]"),
        },
    ),
    (
        "A step of an approval",
        ApprovalStep,
        "tools: {it: {approval: {chain: [{…}]}}}",
        "One group of approvers.",
        {
            "group": ("the group", "group: managers"),
            "after_seconds": (
                "when the group is asked, counted from the start; without it, by `escalation_fraction`",
                "after_seconds: 600",
            ),
        },
    ),
    (
        "Undo",
        Undo,
        "tools: {it: {undo: {…}}}",
        (
            "How a write is undone by a tool of the same upstream"
            " ([explained](../how-to/overlays.md#writes-that-can-be-undone))."
        ),
        {
            "tool": ("the tool that undoes the write, by the upstream's name", "tool: delete_issue"),
            "arguments": (
                (
                    "where its arguments come from: a JSON pointer that begins with `/input`, `/result` or `/before`, a"
                    " value in a text, or a constant"
                ),
                "arguments: {id: /result/structuredContent/id, force: {value: true}}",
            ),
            "before": (
                "a read that is made before the write, so that what was there can be written back",
                "before: {tool: read_file, arguments: {path: /input/path}}",
            ),
            "example": (
                "an input with which admission makes the write, and undoes it; a recipe without one is refused",
                "example: {owner: me, title: a trial}",
            ),
        },
    ),
    (
        "The read before a write",
        Step,
        "tools: {it: {undo: {tool: write, before: {…}}}}",
        "A tool of the upstream that is `read_only`.",
        {
            "tool": ("the tool, by the upstream's name", "tool: read_file"),
            "arguments": ("where its arguments come from: `/input`, or a constant", "arguments: {path: /input/path}"),
        },
    ),
    (
        "A value in a text",
        InText,
        "tools: {it: {undo: {tool: remove, arguments: {id: {…}}}}}",
        "A source of an argument, for servers that write JSON into a text.",
        {
            "text": ("a pointer to the text", "text: /result/content/0/text"),
            "at": ("a pointer into the JSON that the text holds; without it, all of it", "at: /issue/id"),
        },
    ),
    (
        "A constant",
        Constant,
        "tools: {it: {undo: {tool: remove, arguments: {force: {…}}}}}",
        "A source of an argument that is always the same.",
        {"value": ("the value, of any kind", "value: true")},
    ),
)


HEADER = ("field", "type", "default", "meaning", "example")


def examples() -> list[tuple[str, str]]:
    """Each field with an overlay that uses it, and the fields beside it that are required."""
    found: list[tuple[str, str]] = []
    for heading, model, place, _, words in PARTS:
        for name, (_, example) in words.items():
            needed = [
                words[other][1] for other, info in model.model_fields.items() if info.is_required() and other != name
            ]
            found.append((f"{heading}: {name}", place.replace("…", ", ".join([*needed, example]))))
    return found


def page(type_of: Callable[[FieldInfo], str], table: Callable[[Sequence[str], Iterable[Sequence[str]]], str]) -> str:
    """The tables of all parts. `type_of` and `table` write a type and a table as the other pages do."""
    return "\n".join(
        f"## {heading}\n\n{about}\n\n{table(HEADER, _rows(model, words, type_of))}"
        for heading, model, _, about, words in PARTS
    )


def _rows(
    model: type[pydantic.BaseModel], words: Words, type_of: Callable[[FieldInfo], str]
) -> Iterator[tuple[str, ...]]:
    if words.keys() != model.model_fields.keys():
        raise ValueError(f"{model.__name__}: describe {sorted(words.keys() ^ model.model_fields.keys())}")
    for name, info in model.model_fields.items():
        meaning, example = words[name]
        of_one = " (*one tool only*)" if model is ToolOverlay and name in OF_ONE else ""
        yield f"`{name}`", type_of(info), _default(info), meaning + of_one, f"`{example}`"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value in (None, (), {}, "") or isinstance(value, ToolOverlay):
        return "none"
    return f"`{orjson.dumps(pydantic_core.to_jsonable_python(value)).decode()}`"
