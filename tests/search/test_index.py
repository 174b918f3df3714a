"""The index: what is added is found, what is removed is not, and tools that a search is not about do not matter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from interlock.search import index as module
from interlock.search.index import Hit, Index, IndexedTool, Renumbered
from interlock.search.table import shipped

WORDS = ("send", "mail", "invoice", "customer", "weather", "Berlin", "delete", "rowBatch", "日報", "refund")
QUERIES = ("send mail", "refund the customer. delete the invoice", "weather in Berlin", "日報", "row")
texts = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
entries = st.builds(
    IndexedTool,
    id=st.integers(0, 40).map("tool {}".format),
    name=texts,
    description=texts,
    parameters=st.lists(st.sampled_from(WORDS), max_size=3),
    parameter_texts=st.lists(texts, max_size=2),
    server=texts,
)


def everything(index: Index, query: str, limit: int = 100) -> list[Hit]:
    return index.search(query, limit, index.mask(index.ids()))


class Changes(RuleBasedStateMachine):
    """Whatever was added and removed before, an index answers like one that was made anew of the same tools."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(shipped())
        self.known: dict[str, IndexedTool] = {}

    @rule(found=st.lists(entries, max_size=8, unique_by=lambda one: one.id))
    def add(self, found: list[IndexedTool]) -> None:
        self.index.add(found)
        self.known |= {one.id: one for one in found}

    @rule(numbers=st.sets(st.integers(0, 40), max_size=10))
    def remove(self, numbers: set[int]) -> None:
        gone = {f"tool {one}" for one in numbers}
        self.index.remove(gone)
        self.known = {tool: one for tool, one in self.known.items() if tool not in gone}

    @invariant()
    def answers_like_a_new_one(self) -> None:
        assert self.index.ids() == set(self.known)
        anew = Index(shipped())
        anew.add(self.known.values())
        for query in QUERIES:
            one, other = everything(self.index, query), everything(anew, query)
            assert [hit.id for hit in one] == [hit.id for hit in other]
            assert [hit.score for hit in one] == pytest.approx([hit.score for hit in other], abs=1e-5)


@pytest.fixture(autouse=True)
def _renumber_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few removed tools are enough for an index to number the others anew."""
    monkeypatch.setattr(module, "_LEAST_REMOVED", 5)


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=15, stateful_step_count=15)


@given(
    st.lists(entries, max_size=12, unique_by=lambda one: one.id),
    st.lists(entries, max_size=12, unique_by=lambda one: one.id),
    st.sampled_from(QUERIES),
)
def test_tools_that_a_search_is_not_about_change_neither_results_nor_scores(
    seen: list[IndexedTool], hidden: list[IndexedTool], query: str
):
    names = {one.id for one in seen}
    alone, beside = Index(shipped()), Index(shipped())
    alone.add(seen)
    beside.add([one for one in hidden if one.id not in names])
    beside.add(seen)
    one, other = everything(alone, query), beside.search(query, 100, beside.mask(names))
    assert [hit.id for hit in one] == [hit.id for hit in other]
    assert [hit.score for hit in one] == pytest.approx([hit.score for hit in other], abs=1e-5)


def test_a_mask_stays_right_while_tools_come_and_go():
    index = Index()
    index.add([IndexedTool("a", "send mail"), IndexedTool("b", "send mail")])
    seen = index.mask(["a"])
    index.add([IndexedTool("c", "send mail")])
    assert [hit.id for hit in index.search("mail", 10, seen)] == ["a"]
    index.remove(["a"])
    assert index.search("mail", 10, seen) == []
    index.add(IndexedTool(f"{number}", "read mail") for number in range(20))
    index.remove(f"{number}" for number in range(20))
    with pytest.raises(Renumbered):
        index.search("mail", 10, seen)
    assert {hit.id for hit in everything(index, "mail")} == {"b", "c"}


def test_words_of_every_field_are_found_and_the_name_counts_most():
    index = Index()
    index.add(
        [
            IndexedTool("name", "export ledger"),
            IndexedTool("description", "x", description="export the ledger"),
            IndexedTool("parameter", "y", parameters=["ledgerExport"]),
            IndexedTool("text", "z", parameter_texts=["which ledger to export"]),
            IndexedTool("tag", "u", tags=["ledger", "export"]),
            IndexedTool("server", "v", server="ledger-export"),
            IndexedTool("other", "w"),
        ]
    )
    found = [hit.id for hit in everything(index, "export ledger")]
    assert found[0] == "name"
    assert set(found) == {"name", "description", "parameter", "text", "tag", "server"}


def test_a_tool_without_a_common_word_is_found_by_its_meaning():
    index = Index(shipped())
    index.add(
        [
            IndexedTool("mail", "send_email", description="Send an email message to a recipient"),
            IndexedTool("weather", "forecast", description="Weather for the next days"),
            IndexedTool("math", "add", description="Add two numbers"),
        ]
    )
    assert [hit.id for hit in everything(index, "notify somebody in writing")] == ["mail"]
    assert everything(index, "asdf qwer zxcv") == []
    assert everything(index, "will it rain tomorrow", 1)[0].id == "weather"


def test_of_equal_tools_those_whose_names_come_first_are_found():
    # Which of equal numbers a partial sort takes depends on the processor.
    names = [f"tool_{number:03}" for number in range(500)]
    for added in (names, names[::-1], sorted(names, key=lambda name: name[::-1])):
        index = Index(shipped())
        index.add(IndexedTool(name, "send", "Send a letter. It goes by post.") for name in added)
        found = index.search("send a letter to a customer; write it first", 5, index.mask(names))
        assert [hit.id for hit in found] == names[:5]
        assert len({hit.score for hit in found}) == 1
