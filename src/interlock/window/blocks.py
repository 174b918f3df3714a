"""Tool results as blocks of a model's context, with delimiters that their content cannot write.

    <tool_result tool_id="demo.balance" invocation_id="01JC…" timestamp="…" source="…" freshness="…" confidence="1.0">
    1250
    </tool_result>

INVARIANT: a block contains exactly two `<`, those of its own delimiters. Every other one is escaped, in the content and
in the attributes, as are characters that are invisible, change direction or control a terminal. So content can neither
close its block nor open another, whatever it says; `read_blocks` gives back exactly what went in.

Text that looks like the frame of a conversation (`[INST]`, `System:` at the start of a line) or like an order to drop
instructions is escaped at its first character, so it cannot be taken for the template of a chat. What cannot be
recognised by its form stays as it is: a model must treat all content of a block as data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Final

from interlock.core.expressions import expression
from interlock.core.record import dataclass

# Tabs and line ends stay in the content, and are escaped in attributes.
_SPECIAL = expression(
    "[<>&＜＞﹤﹥\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)
_ROLES: Final = "(?:system|assistant|human|user|developer|tool)(?: message| prompt)?"
_ORDERS: Final = "(?:ignore|disregard|forget|override|ignoriere|vergiss|ignora|olvida|ignorez|oubliez|ignorieren Sie)"
# What such an order is about, also in German, Spanish, Portuguese, Italian and French.
_DROPPED: Final = (
    "(?:instructions?|prompts?|rules|messages|guidelines|above|anweisung(?:en)?|instrucciones|instruções|istruzioni)"
)
# The first character of text that looks like an instruction, and the characters above.
_SUSPECT = expression(
    f"{_SPECIAL.pattern}"
    r"|\[(?=/?(?:INST|SYS|SYSTEM)\])"
    rf"|(?<![^\n])(?={_ROLES}\s{{0,9}}:)\w"
    r"|(?<![^\n])#(?=#{0,5} {0,9}(?:system|assistant|human|user|instructions?|response)\b)"
    rf"|\b(?={_ORDERS}(?:\s{{1,9}}\w{{1,12}}){{0,4}}?\s{{1,9}}{_DROPPED}\b)\w"
    r"|\b(?=(?:new|updated|important)\s{1,9}instructions?\s{0,9}:)\w"
    r"|\b(?=(?:you are now|from now on you)\b)\w"
    r"|(?=(?:忽略|无视|無視|忘记|忘れ)[^\n]{0,16}(?:指令|指示|提示|规则))\w"
    r"|(?=(?:指令|指示|提示|规则)[^\n]{0,16}(?:無視|忘れ))\w",
    re.IGNORECASE,
)
# Without one of these there is no such text. That is found out much faster.
_SIGN = expression(rf"^(?:#|{_ROLES}\s{{0,9}}:)", re.IGNORECASE | re.MULTILINE)
_SIGNS: Final = (
    "ignor", "disregard", "forget", "override", "vergiss", "olvida", "oubliez", "instruction", "you are now",
    "from now on you", "[inst", "[/inst", "[sys", "[/sys", "忽略", "无视", "無視", "忘",
)  # fmt: skip
_IN_ATTRIBUTE = expression(f'{_SPECIAL.pattern[:-1]}"\t\n]')
_NAMES: Final = {"<": "&lt;", ">": "&gt;", "&": "&amp;", '"': "&quot;"}
_VALUES: Final = {name: character for character, name in _NAMES.items()}
_ESCAPE = expression(r"&(?:lt|gt|amp|quot);|&#x([0-9a-f]{1,6});")
_BLOCK = expression(r"<tool_result((?: [a-z_]+=\"[^\"<]*\")*)>\n([^<]*)\n</tool_result>\n?")
_ATTRIBUTE = expression(r" ([a-z_]+)=\"([^\"]*)\"")


@dataclass(frozen=True, slots=True)
class Block:
    """A tool result in a context: what it says, and where that comes from."""

    tool_id: str
    invocation_id: str
    timestamp: str
    source: str
    freshness: str
    confidence: str
    content: str

    def text(self) -> str:
        attributes = "".join(
            f' {one.name}="{_IN_ATTRIBUTE.sub(_escaped, getattr(self, one.name))}"' for one in fields(self)[:-1]
        )
        return f"<tool_result{attributes}>\n{_inert(self.content)}\n</tool_result>\n"


def _inert(content: str) -> str:
    lowered = content.lower()
    suspect = any(sign in lowered for sign in _SIGNS) or _SIGN.search(content) is not None
    return (_SUSPECT if suspect else _SPECIAL).sub(_escaped, content)


def read_blocks(text: str) -> Iterator[Block]:
    """The blocks in a text, with their content as it was."""
    for found in _BLOCK.finditer(text):
        attributes = {name: _ESCAPE.sub(_restored, value) for name, value in _ATTRIBUTE.findall(found[1])}
        yield Block(**attributes, content=_ESCAPE.sub(_restored, found[2]))


def _escaped(match: re.Match[str]) -> str:
    return _NAMES.get(match[0]) or f"&#x{ord(match[0]):x};"


def _restored(match: re.Match[str]) -> str:
    return _VALUES[match[0]] if match[1] is None else chr(int(match[1], 16))
