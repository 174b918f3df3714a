"""The limits that the source keeps: no import cycles, bounded fan-out, file sizes and class sizes."""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import count, takewhile

from interlock.call.endpoints import ENDPOINTS
from interlock.contract.executors import EXECUTORS, PROTOCOLS
from tests import house
from tests.support.source import nodes_of

MOST_IMPORTED = 15
LONGEST_FILE = 500
# With imports for types alone: the widest module, and how many are over MOST_IMPORTED. These numbers may only fall.
MOST_IMPORTED_TYPED = 37
OVER_WITH_TYPES = 62
# Classes of one name in several modules: a reader has to ask which. This number may only fall.
SHARED_NAMES = 122
# This number may only fall.
DIRECT_IMPORTS_OF_COMMANDS = 4
# The connector of `openapi` and `http` upstreams: its own definitions say of which of the two they are.
OWN_PROTOCOL = {"interlock.upstreams.http", "interlock.upstreams.http_requests"}
# Over the limit today. A number here may only fall; an entry that is no longer needed is removed.
WIDE: dict[str, int] = {}
# "Whoever" hides who is meant; the others are words that a reader has to guess at.
ODD_WORDS = (
    "whoever", "mend", "mends", "mended", "unsaid", "says better", "for want of", "the whole place's", "in local needs",
)  # fmt: skip
# Names that do not say what they stand for. As a local variable, `found` may hold the result of a look-up.
ODD_NAMES = {
    "told", "said", "kept", "found", "way", "ways", "desk", "asking", "elsewhere", "promises", "straight", "thin",
    "hot",
}  # fmt: skip
# Words that no name of a constant has: it says how many, how long or which.
ODD_PARTS = ODD_NAMES - {"found"}
# Longer files, with the reason why they are one file. A number here may only fall.
LONG_FILES = {
    "interlock.contract.manifest": (
        669,
        "one document: the fields of a manifest, each beside the checks that it needs",
    ),
    "interlock.settings": (676, "one table: the settings, each with its bounds and its description"),
    "interlock.upstreams.mcp.session": (556, "one conversation: its two directions share the requests that are open"),
    "interlock.http.connection": (526, "one state machine: every callback of the parser changes the same fields"),
    "interlock.authority.commands": (525, "one parser: the grammar of a shell, rule by rule"),
}
# No docstring begins with one of these.
RIDDLES = ("What", "Who", "Whose", "Whom", "How", "Where")
# The code's own words for the data directory and the endpoints, which people do not meet.
INTERNAL_WORDS = ("home", "homes", "door", "doors")
# Labels that leave open what they stand for: a key is an idempotency key or a signing key.
ODD_LABELS = (*INTERNAL_WORDS, "key", "key from", "said by", "otherwise")
# Modules above `store` that read the store synchronously, how often, and why. A number here may only fall.
SYNCHRONOUS = {
    "interlock.gateway.persistence.sessions": (
        1,
        "the code of a tool reads the state of its session without await; that of a write is read before it runs",
    ),
}


def test_contracts_on_imports_name_every_package():
    """A package that a contract of lint-imports does not name may import anything."""
    linter = tomllib.loads((house.ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = {one["name"]: one for one in linter["contracts"]}
    packages = house.packages() - {"interlock._version"}
    drivers = contracts["only the store imports a database driver"]
    assert packages - set(drivers["source_modules"]) == {"interlock.store"}
    assert set(drivers["forbidden_modules"]) == {"sqlite3", "psycopg", "sqlalchemy", "alembic"}
    transport = contracts["the HTTP transport imports core and data only"]
    assert packages - set(transport["forbidden_modules"]) == {"interlock.http", "interlock.core", "interlock.data"}
    vocabulary = {f"interlock.{name}" for name in ("core", "data", "privacy", "contract", "call", "window")}
    used = vocabulary | {f"interlock.{name}" for name in ("api", "http", "net", "settings", "telemetry")}
    endpoints = contracts["endpoints import the api and vocabulary only"]
    assert packages - set(endpoints["forbidden_modules"]) == {"interlock.doors", *used}
    commands = contracts["commands import the api and vocabulary only"]
    assert packages - set(commands["forbidden_modules"]) == {"interlock.cli", *used}
    assert len(commands["ignore_imports"]) <= DIRECT_IMPORTS_OF_COMMANDS
    assert contracts["imports point down only"]["exhaustive"] is True


def test_endpoints_and_commands_import_no_lower_layer_for_types_either():
    """The linter leaves out what only the type checker imports. `api.types` has the types that they name."""
    linter = tomllib.loads((house.ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    found: list[str] = []
    for contract in linter["contracts"]:
        if "the api and vocabulary only" in contract["name"]:
            (own,) = contract["source_modules"]
            for name, module in house.modules().items():
                if house.is_within(name, own):
                    typed = house.imports(module, lazily=True, typed=True) - house.imports(module, lazily=True)
                    forbidden = contract["forbidden_modules"]
                    found += [f"{name} {one}" for one in typed if any(house.is_within(one, low) for low in forbidden)]
    assert found == []


def test_the_types_for_endpoints_and_commands_are_loaded_by_nobody():
    """The module imports parts of every layer: loading it would make each command start as slowly as a server."""
    at_run_time = [
        name for name, one in house.modules().items() if "interlock.api.types" in house.imports(one, lazily=True)
    ]
    assert at_run_time == []


def test_endpoints_do_not_import_each_other():
    rows = [one.module for one in ENDPOINTS.values()]
    for own in rows:
        others = tuple(one for one in rows if one != own)
        reached = house.reached_from(name for name in house.modules() if house.is_within(name, own))
        assert [one for one in sorted(reached) if any(house.is_within(one, other) for other in others)] == [], own


def test_no_module_compares_with_the_name_of_a_row():
    """The rows of the tables say how endpoints and executors differ, so that a new one needs no other change."""
    assert house.comparisons_with("door", ENDPOINTS) == []
    assert house.comparisons_with("execution.kind", EXECUTORS) == []
    compared = {one.partition(":")[0] for one in house.comparisons_with("protocol", PROTOCOLS)}
    assert compared == OWN_PROTOCOL


def test_endpoints_and_commands_do_not_reach_into_the_parts():
    """They ask `api`; what it lets them do with the parts behind it stands there, once."""
    outer = [one for name, one in house.modules().items() if name.startswith(("interlock.doors.", "interlock.cli."))]
    reaching = [
        f"{module.name}:{node.lineno}"
        for module in outer
        for node in nodes_of(module.tree, ast.Attribute)
        if node.attr in {"gateway", "catalog", "journal", "verifier"}
    ]
    assert reaching == []


def test_rights_are_checked_in_the_api():
    """An endpoint or a command that checks a right of its own is a second rule, which the others do not have."""
    checking = {name for name in house.checks_of_rights() if not name.startswith("api.")}
    assert checking == house.CHECKS_RIGHTS.keys()


def test_no_module_imports_itself_through_others():
    """Not by imports inside functions either, nor by types that only the type checker sees."""
    assert house.cycles(typed=True) == []


def test_a_module_imports_few_of_ours():
    """A module that imports many others knows too much; the composition roots are the exception."""
    over = {name: count for name, count in house.fan_out().items() if count > WIDE.get(name, MOST_IMPORTED)}
    assert over == {}


def test_imports_for_types_do_not_grow():
    """They cost nothing at run time, but a reader follows them as well."""
    counts = house.fan_out(typed=True).values()
    assert max(counts) <= MOST_IMPORTED_TYPED
    assert sum(count > MOST_IMPORTED for count in counts) <= OVER_WITH_TYPES


def test_fewer_and_fewer_classes_share_a_name():
    assert len(house.shared_names()) <= SHARED_NAMES, house.shared_names()


def test_a_file_is_short_or_has_a_reason():
    long = {name: one.lines for name, one in house.modules().items() if one.lines > LONGEST_FILE}
    assert {name: lines for name, lines in long.items() if lines > LONG_FILES.get(name, (0, ""))[0]} == {}
    assert LONG_FILES.keys() - long.keys() == set(), "remove the reason that is no longer needed"


def test_a_class_has_few_methods_or_says_why():
    assert house.large_classes() == {}, f"take it apart, or say why above it: `{house.REASON} …`"


def test_modules_keep_no_mutable_state():
    """State at the level of a module is shared by everything in a process, and by all tests."""
    assert house.mutable_state() == [], f"remove it, or say why above it: `{house.STATE_REASON} …`"


def test_sentences_use_no_odd_words():
    """Comments, messages and pages are plain technical English: these words were found odd by readers."""
    assert house.sentences_with(ODD_WORDS) == []


def test_names_say_what_they_stand_for():
    """Name a thing by what it is: a message, a document, a reply, the stored row."""
    assert [
        place for name, place in house.names() if name.strip("_") in ODD_NAMES | {one.title() for one in ODD_NAMES}
    ] == []


def test_names_of_constants_say_what_they_hold():
    """`KEPT = 1000` is how many of what? `MOST_CALLS` says it."""
    found = [place for name, place in house.constants() if ODD_PARTS & {*name.lower().split("_")}]
    assert found == []


def test_docstrings_are_plain_statements():
    """A docstring that begins with a question word names a thing by a riddle: "What a model sees of a catalog"."""
    assert house.docstrings_that_begin_with(RIDDLES) == []


def test_texts_for_people_say_data_directory_and_endpoint():
    """The option `--home`, the field `door` and the like are names; in words they are data directory and endpoint."""
    assert house.texts_with(INTERNAL_WORDS) == []


def test_labels_for_people_say_endpoint_and_which_key():
    """The rows and columns that commands print are named by the words of the glossary."""
    assert house.labels_with(ODD_LABELS) == []


def test_numbers_of_migrations_are_unique_and_in_a_documented_range():
    """The page on upgrades has the ranges of subjects and the numbers that stay unused; later numbers have no gaps."""
    page = (house.ROOT / "docs" / "how-to" / "upgrade.md").read_text()
    rows = re.findall(r"^\| (\d{4}) to (\d{4}) \|", page, re.MULTILINE)
    ranges = [range(int(first), int(last) + 1) for first, last in rows]
    unused = re.search(r"unused numbers stay unused: ([\d, and]+)\.", page)
    files = (house.SOURCE / "store" / "migrations" / "versions").glob("[0-9]*.py")
    used = sorted(int(one.name.partition("_")[0]) for one in files)
    assert unused is not None
    assert len(used) == len(set(used))
    documented = [number for one in ranges for number in one]
    assert documented == list(range(1, documented[-1] + 1)), "the ranges do not overlap and leave nothing out"
    gaps = {int(number) for number in re.findall(r"\d{4}", unused[1])}
    later = takewhile(lambda number: number <= used[-1], count(documented[-1] + 1))
    assert used == [*sorted(set(documented) - gaps), *later]


def test_reads_of_the_store_are_awaited():
    """A database that is reached over a network cannot be read on the event loop: `await store.read(work)`."""
    above = [one for one in house.modules().values() if not one.name.startswith("interlock.store")]
    counts = {one.name: count for one in above if (count := house.synchronous_reads(one))}
    assert counts == {name: most for name, (most, _) in SYNCHRONOUS.items()}


def test_no_module_imports_a_test_module_or_a_helper_of_another_directory():
    """What several test files use is in `tests/support`, or a fixture of a `conftest.py`."""
    assert house.imports_of_tests() == []
