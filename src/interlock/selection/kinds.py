"""The kinds of help that a tool can give: read, change, compute, communicate.

A tool says them by its name, by the first words of its description, and by its mutation class. The words are a fixed
list, so that anybody can see why a tool was counted as what. A tool that no word describes may give any help.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from interlock.search import words

Kind = Literal["read", "change", "compute", "communicate", "none"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
EVERY: Final[frozenset[Kind]] = frozenset(("read", "change", "compute", "communicate"))

_VERBS: Final[dict[Kind, str]] = {
    "read": """
        get list search find fetch read show lookup look view retrieve query browse check download describe display scan
        watch status inspect monitor locate explore preview return returns history nearest count top forecast whois
        """,
    "change": """
        create add set update delete remove insert edit write move rename copy upload book cancel order buy pay place
        assign approve archive merge schedule reschedule start stop restart submit register install deploy save store
        put replace modify change enable disable transfer renew revoke open close lock unlock publish commit reset clear
        apply issue reserve purchase import restore rotate enroll drop kill mark log record turn
        """,
    "compute": """
        calculate compute convert estimate solve predict compare validate parse extract detect translate summarize
        analyze analyse generate render plot format optimize classify transcribe decode encode simulate sum average
        compound conjugate transliterate measure identify crop resize compress normalize
        """,
    "communicate": """
        send notify reply message email mail post tweet invite announce broadcast share forward call dial sms remind
        """,
}
# Verbs that two kinds of tools have: a rendered file is saved, a scan is a computation, a post is a change.
_BOTH: Final[dict[str, tuple[Kind, ...]]] = {
    "generate": ("compute", "change"), "render": ("compute", "change"), "plot": ("compute", "change"),
    "check": ("read", "compute"), "scan": ("read", "compute"), "count": ("read", "compute"),
    "forecast": ("read", "compute"), "compare": ("compute", "read"), "identify": ("compute", "read"),
    "detect": ("compute", "read"), "analyze": ("compute", "read"), "analyse": ("compute", "read"),
    "extract": ("compute", "read"), "download": ("read", "change"), "post": ("communicate", "change"),
    "share": ("communicate", "change"), "call": ("communicate", "change"), "remind": ("communicate", "change"),
    "publish": ("change", "communicate"), "submit": ("change", "communicate"), "schedule": ("change", "communicate"),
    "crop": ("compute", "change"), "resize": ("compute", "change"), "compress": ("compute", "change"),
    "convert": ("compute", "change"), "translate": ("compute",), "open": ("change", "read"), "log": ("change", "read"),
    "record": ("change", "read"), "format": ("compute", "change"), "optimize": ("compute", "change"),
    "turn": ("change",), "apply": ("change", "compute"), "parse": ("compute", "read"), "import": ("change", "read"),
}  # fmt: skip
_KINDS: Final[dict[str, tuple[Kind, ...]]] = {
    **{verb: (kind,) for kind, verbs in _VERBS.items() for verb in verbs.split()},
    **_BOTH,
}
# Mutation classes that somebody has declared.
_READS: Final[frozenset[Kind]] = frozenset(("read", "compute"))
_WRITES: Final[frozenset[Kind]] = frozenset(("change", "communicate", "compute"))


def kinds_of(name: str, description: str = "", mutation_class: str = "") -> frozenset[Kind]:
    """The kinds of help that a tool can give; all of them where nothing says which.

    A tool that is declared to read never changes anything. One that is declared to write may be counted so only because
    nobody has said that it reads, so its words count too.
    """
    stated = named_kinds(name, description)
    if mutation_class == "read_only":
        return (stated & _READS) or _READS
    if mutation_class in ("write_reversible", "write_irreversible"):
        return stated | _WRITES if stated else EVERY
    return stated or EVERY


def named_kinds(name: str, description: str = "") -> frozenset[Kind]:
    """The kinds that the name of a tool says, or the first word of its description; none where neither says one."""
    return _named(name) or _named(" ".join(words.split(description)[:1]))


def _named(name: str) -> frozenset[Kind]:
    """The kinds that the words of a name say: those of its first verb."""
    for word in words.split(name.rpartition(".")[2])[:3]:
        found = _KINDS.get(word.lower()) or _KINDS.get(word.lower().removesuffix("s"))
        if found:
            return frozenset(found)
    return frozenset()
