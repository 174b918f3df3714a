"""Questions of a server during a call: elicitation, sampling, roots.

A question is put to the client of the call that raised it. Where that is impossible, the server gets an error and the
call fails with E3411, which says why and what to do. Interlock never answers in the place of a person who was not
asked: to a server, `decline` means that somebody read the question and said no.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlock.call.connector import ALONE, Interaction
from interlock.call.mcp import INVALID_PARAMS, METHOD_NOT_FOUND, QUESTIONS
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams.mcp.protocol import RpcError, ServerInfo

_INTERNAL_ERROR = -32603
# The error of a client whose user refused a request for sampling: an answer, like `decline` of an elicitation.
USER_REJECTED = -1
NOBODY_ASKED = "nobody was asked: "


class Questions:
    """The questions of one call. `passed_on`: whether the configuration of the upstream permits them."""

    __slots__ = ("_doubt", "_interaction", "_passed_on", "_unanswered")

    def __init__(self, interaction: Interaction = ALONE, *, passed_on: bool = True) -> None:
        self._interaction = interaction
        self._passed_on = passed_on
        self._unanswered: tuple[str, str, str] | None = None
        self._doubt: tuple[str, str] | None = None

    async def put(self, method: str, params: Json) -> Json:
        """Return the client's answer to a question. Raises RpcError, for the server, if there is none."""
        asked, capability = self._interaction, QUESTIONS[method]
        if not self._passed_on:
            why, advice = "its questions are not passed on", "add the upstream again with --questions"
            raise self._without_answer(METHOD_NOT_FOUND, method, why, advice)
        if asked.ask is None or capability not in asked.capabilities:
            why = f"the client of this call cannot be asked: it did not declare `{capability}`"
            advice = f"make the call with an MCP client that declares `{capability}`"
            raise self._without_answer(METHOD_NOT_FOUND, method, why, advice)
        try:
            return await asked.ask(method, params)
        except Failure as failure:
            code = (failure.details or {}).get("code")
            if code == USER_REJECTED:
                raise RpcError(USER_REJECTED, failure.message, None) from None
            advice = "see why the client does not answer questions, then make the call again"
            raise self._without_answer(_INTERNAL_ERROR, method, failure.message, advice) from None

    def _without_answer(self, code: int, method: str, why: str, advice: str) -> RpcError:
        if self._unanswered is None:
            self._unanswered = (method, why, advice)
        return RpcError(code, f"{NOBODY_ASKED}{why}", None)

    @property
    def client(self) -> str:
        """The session of the client that is asked; empty if it has none."""
        return self._interaction.client

    def reaches(self, method: str) -> bool:
        """Whether there is a client that this kind of question can be put to."""
        asked = self._interaction
        return self._passed_on and asked.ask is not None and QUESTIONS[method] in asked.capabilities

    def doubt(self, method: str, why: str) -> None:
        """Note that a question was not answered, which this call or another one may have raised."""
        self._doubt = (method, why)

    def explain(self, failure: Failure) -> Failure:
        """Return the failure of a call whose server answered with an error: its cause is the question without answer,
        if there was one.
        """
        details_given = failure.details or {}
        if self._unanswered is not None:
            method, why, advice = self._unanswered
            words = f"the upstream asked a question (`{method}`) that nobody was asked: {why}; then {failure.message}"
            details = {**details_given, "unanswered": {"method": method, "reason": why}}
            return Failure("E3411", words, details=details, resolution=advice)
        if self._doubt is not None:
            method, why = self._doubt
            details = {**details_given, "unanswered": {"method": method, "reason": why}}
            words = f"{failure.message}; the upstream also asked a question (`{method}`) that nobody was asked"
            return failure.saying(f"{words}: {why}", details)
        return failure


async def put_for_one_of(possible: Sequence[Questions], method: str, params: Json) -> Json:
    """Put a question that belongs to one of these calls. Raises RpcError, for the server, if there is no answer.

    INVARIANT: it is put only if all of them have the same client, to which it then belongs, whichever call raised it.
    The server matches answers with its questions by their ids, so each call gets its own.
    """
    clients = {one.client for one in possible}
    if not possible or (len(possible) > 1 and (len(clients) > 1 or "" in clients)):
        raise unclear(method, possible)
    *others, latest = possible
    try:
        return await latest.put(method, params)
    except RpcError as error:
        if error.code != USER_REJECTED:
            for one in others:
                one.doubt(method, error.message.removeprefix(NOBODY_ASKED))
        raise


def unclear(method: str, possible: Sequence[Questions]) -> RpcError:
    """Return the error for a question that may be of several clients, or of none."""
    why = "nothing says to which call it belongs"
    for one in possible:
        one.doubt(method, why)
    return RpcError(_INTERNAL_ERROR, f"{NOBODY_ASKED}it is not clear to which call the question belongs", None)


def answerable(interaction: Interaction, *, passed_on: bool) -> Json:
    """Return the questions that a client can answer, with which a conversation of the handshake era must be opened."""
    if interaction.ask is None or not passed_on:
        return {}
    return {name: options for name, options in interaction.capabilities.items() if name in QUESTIONS.values()}


def refuse_answers(server: ServerInfo, interaction: Interaction) -> None:
    """INVARIANT: a server of the handshake era, which takes no answers, does not run a tool again because of them."""
    if interaction.answers and not server.modern:
        raise Failure(
            "E3411",
            "Invalid or expired requestState: the call that asked is over, or belongs to another",
            details={"sent": False, "code": INVALID_PARAMS},
            resolution="make the call again without inputResponses and requestState",
        )
