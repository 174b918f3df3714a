"""The words that a search counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.search.table import shipped
from interlock.search.words import sentences, split, terms


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("getHTTPStatus_v2", ["get", "HTTP", "Status", "v", "2"]),
        ("list-open-issues", ["list", "open", "issues"]),
        ("XMLHttpRequest", ["XML", "Http", "Request"]),
        ("S3Object", ["S", "3", "Object"]),
        ("übergrößeÄndern", ["übergrößeÄndern"]),
        ("", []),
    ],
)
def test_identifiers_are_split_into_words(text: str, parts: list[str]):
    assert split(text) == parts


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("sendEmails", "send an email"),
        ("list_open_issues", "listing the open issue"),
        ("CAFÉ", "cafe"),
        ("発注を取り消す", "発注を取り消す"),
    ],
)
def test_forms_of_the_same_words_have_the_same_terms(one: str, other: str):
    assert set(terms(one)) == set(terms(other)) != set()


def test_text_without_spaces_is_cut_into_pairs():
    assert terms("天气预报") == ["天气", "气预", "预报"]
    assert terms("天") == ["天"]


def test_a_request_of_several_intents_is_split():
    assert sentences("Find the cheapest flight to Rome. Then book it for me and then mail the ticket to Ann!") == [
        "Find the cheapest flight to Rome.",
        "Then book it for me",
        "mail the ticket to Ann!",
    ]
    assert sentences("one intent alone, whatever its length") == []


@given(st.text(max_size=300))
def test_any_text_has_terms_sentences_and_a_vector(text: str):
    assert all(terms(text))
    assert len(sentences(text)) <= 6
    (vector,) = shipped().queries([text])
    length = float((vector * vector).sum())
    assert length == 0 or abs(length - 1) < 1e-3
