"""Counts the tokens of texts.

Every model family has a tokenizer of its own, and most are not published. Without further packages tokens are
estimated from the text: words, digits, punctuation, line ends and characters of other scripts, each with a weight that
was fitted to the tokenizer o200k. On tool schemas, JSON results, Markdown and source code the estimate is within 2 % on
average and 10 % for most single texts. 10 % are added, so that a window that is full by the estimate is rarely too
full. Random text without spaces, such as base64, takes up to 10 % more tokens than the estimate says.

Exact counters are one setting away: `o200k` and `cl100k` need the package rs-bpe, and `MODULE:NAME` is any function
from text to a whole number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal, cast

from interlock.core.errors import Failure
from interlock.core.expressions import expression

Counter = Callable[[str], int]
Exact = Literal["o200k", "cl100k"]
EXACT: Final[tuple[Exact, ...]] = ("o200k", "cl100k")
MARGIN: Final = 1.1

# Tokenizers split words at capitals. A run of lower-case letters that is longer than any word is not one.
_WORD = expression(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[A-Z]")
_DIGITS = expression(r"[0-9]+")
_PUNCTUATION = expression(r"[!-/:-@\[-^`{-~]+")  # without the underscore, which is mostly part of a word
_LINE_END = expression(r"\n\s*")
_SPACES = expression(r"[ \t]{2,}")
_USUAL, _LONGEST = 6, 16
_OTHERS: Final = (
    (0.32, expression("[\x80-\u07ff]")),
    (0.68, expression("[\u3000-\u9fff\uac00-\ud7af\uff00-\uffef]")),
    (0.5, expression("[\u0800-\u2fff\ua000-\uabff\ud7b0-\ufeff]")),
    (1.6, expression("[\U00010000-\U0010ffff]")),
)


def estimate(text: str) -> int:
    """The estimated number of tokens of a text, with the margin."""
    lengths = list(map(len, _WORD.findall(text)))
    tokens = (
        0.96 * len(lengths)
        + 0.04 * sum(min(length, _LONGEST) - _USUAL for length in lengths if length > _USUAL)
        + 0.53 * sum(length - _LONGEST for length in lengths if length > _LONGEST)
        + 1.4 * sum((len(run) + 2) // 3 for run in _DIGITS.findall(text))
        + 0.9 * sum((len(run) + 2) // 3 for run in _PUNCTUATION.findall(text))
        + 0.33 * text.count("_")
        + 1.2 * len(_LINE_END.findall(text))
        + 0.026 * sum(len(run) - 1 for run in _SPACES.findall(text))
    )
    if not text.isascii():
        tokens += sum(weight * len(pattern.findall(text)) for weight, pattern in _OTHERS)
    return math.ceil(tokens * MARGIN)


def exact(name: Exact) -> Counter:
    """A counter of OpenAI's tokenizers; E3108 if the package that has them is not installed."""
    try:
        import rs_bpe  # pyright: ignore[reportMissingImports] - optional, and without stubs
    except ImportError:
        words = f"the counter `{name}` needs the package rs-bpe, which is not installed"
        raise Failure("E3108", words, resolution="install it: pip install rs-bpe; or set counter to estimate") from None
    tokenizer: Any = getattr(cast("Any", rs_bpe).openai, f"{name}_base")()
    return lambda text: int(tokenizer.count(text))


def checked(name: str, count: Callable[[str], Any]) -> Counter:
    """A counter of the operator's, held to its promise: a whole number, not negative, for every text (E3108)."""

    def held(text: str) -> int:
        try:
            tokens = count(text)
        except Exception as error:
            raise _broken(name, f"it raised {type(error).__name__}") from error
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise _broken(name, "it returned something else than a whole number of 0 or more")
        return tokens

    return held


def _broken(name: str, why: str) -> Failure:
    words = "correct the function that the setting `counter` names, or set it to estimate"
    return Failure("E3108", f"the token counter `{name}` does not work: {why}", resolution=words)
