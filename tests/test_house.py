"""The limits that the source keeps: no import cycles, bounded fan-out, file sizes and class sizes."""

from __future__ import annotations

from tests import house

MOST_IMPORTED = 15
# This number may only fall.
LONGEST_FILE = 700
# Over the limit today. A number here may only fall; an entry that is no longer needed is removed.
WIDE: dict[str, int] = {}
# "Whoever" hides who is meant; the others are words that a reader has to guess at.
ODD_WORDS = (
    "whoever", "mend", "mends", "mended", "unsaid", "says better", "for want of", "the whole place's", "in local needs",
)  # fmt: skip
# Modules above `store` that read the store synchronously, how often, and why. A number here may only fall.
SYNCHRONOUS = {
    "interlock.gateway.persistence.sessions": (
        1,
        "the code of a tool reads the state of its session without await; that of a write is read before it runs",
    ),
}


def test_no_module_imports_itself_through_others():
    assert house.cycles() == []


def test_a_module_imports_few_of_ours():
    """A module that imports many others knows too much; the composition roots are the exception."""
    over = {name: count for name, count in house.fan_out().items() if count > WIDE.get(name, MOST_IMPORTED)}
    assert over == {}


def test_files_do_not_grow():
    assert {name: one.lines for name, one in house.modules().items() if one.lines > LONGEST_FILE} == {}


def test_a_class_has_few_methods_or_says_why():
    assert house.large_classes() == {}, f"take it apart, or say why above it: `{house.REASON} …`"


def test_modules_keep_no_mutable_state():
    """State at the level of a module is shared by everything in a process, and by all tests."""
    assert house.mutable_state() == [], f"remove it, or say why above it: `{house.STATE_REASON} …`"


def test_sentences_use_no_odd_words():
    """Comments, messages and pages are plain technical English: these words were found odd by readers."""
    assert house.sentences_with(ODD_WORDS) == []


def test_reads_of_the_store_are_awaited():
    """A database that is reached over a network cannot be read on the event loop: `await store.read(work)`."""
    above = [one for one in house.modules().values() if not one.name.startswith("interlock.store")]
    counts = {one.name: count for one in above if (count := house.synchronous_reads(one))}
    assert counts == {name: most for name, (most, _) in SYNCHRONOUS.items()}


def test_no_module_imports_a_test_module():
    """What several test files use is in `tests/support`, or a fixture of a `conftest.py`."""
    assert house.imports_of_tests() == []
