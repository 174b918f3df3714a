"""A policy engine elsewhere, asked over HTTP.

Two forms of the question. `interlock` is our own: `POST {url}/v1/authorize` with subject, action, resource and context,
answered by decision (allow, deny, ask, passthrough), reason and obligations. `authzen` is that of OpenID AuthZEN 1.0:
`POST {url}/access/v1/evaluation`, answered by a decision of true or false and a context with reason and obligations.

An obligation is a condition on a yes. `require_approval` makes it an ask; `alert` and `log` are passed on for the
gateway to fulfil; one that nobody here can fulfil is a no.

Each question has a connection of its own. On a connection that is used again, an engine that answers twice would answer
the next question with what it said of this one.

INVARIANT: whatever is not a well-formed answer in time (an error, a redirect, a status other than 200, too many bytes,
a name that stands twice in its JSON) is E3205 and is never remembered. What is remembered stands under everything that
was sent, but for the time of asking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import orjson

from interlock.authority.keys import strict_json
from interlock.authority.questions import Memory, Question, expiry
from interlock.core.clock import Clock, iso
from interlock.core.context import Caller
from interlock.core.errors import Failure
from interlock.core.phases import Behavior, Decision
from interlock.core.schema import Json

if TYPE_CHECKING:
    import httpx

Form = Literal["interlock", "authzen"]

PATHS: Mapping[Form, str] = {"interlock": "/v1/authorize", "authzen": "/access/v1/evaluation"}
MAX_ANSWER = 64 * 1024
FULFILLED = frozenset({"alert", "log"})
_BEHAVIORS: dict[Any, Behavior] = {name: name for name in ("allow", "deny", "ask", "passthrough")}


class Remote:
    """An engine behind a URL."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        form: Form = "interlock",
        token: str | None = None,
        timeout_s: float = 2.0,
        send_arguments: bool = True,
    ) -> None:
        self._url = url.rstrip("/") + PATHS[form]
        self._form = form
        self._token = token
        self._timeout_s = timeout_s
        self._send_arguments = send_arguments
        self._memory = Memory(clock.monotonic)
        self.questions = 0

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        import httpx

        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        # The environment's proxies and credentials are not for this connection.
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(
            headers=headers, timeout=self._timeout_s, follow_redirects=False, trust_env=False, limits=limits
        )

    def plain(self, caller: Caller, digest: str, now: float, now_ms: int) -> Decision | None:
        """Nothing: what an engine elsewhere reads of a call is its own affair."""
        return None

    def cached(self, question: Question) -> Decision | None:
        """The decision that is remembered for exactly this question, if any."""
        slot = self._memory.slot(question)
        return None if slot is None else self._memory.get(slot, self._key(question), question.now_ms)

    async def decide(self, question: Question) -> Decision:
        """What the engine says. E3205 when it does not say anything that can be understood."""
        known = self.cached(question)
        if known is not None:
            return known
        self.questions += 1
        epoch, key = self._memory.epoch, self._key(question)
        decision = self._decision(await self._ask(question), question)
        if epoch == self._memory.epoch:
            self._memory.put(self._memory.slot(question) or self._memory.open(question, None), key, decision)
        return decision

    def forget(self, subjects: Collection[str] | None) -> None:
        """Drop what is remembered of these callers; None means of all."""
        self._memory.forget(subjects)

    async def close(self) -> None:
        """Close the connections."""
        if "_client" in self.__dict__:
            await self._client.aclose()

    # Asking

    def _key(self, question: Question) -> bytes:
        return _encoded(self._context(question))

    def _context(self, question: Question) -> Json:
        caller, contract = question.caller, question.contract
        context: Json = {
            "required_permissions": list(contract.auth.required_permissions),
            "on_behalf_of": caller.id,
            "tenant": caller.tenant,
            "scopes": sorted(caller.scopes),
            "operation": question.operation,
            "session": question.session,
            "door": question.door,
            "native": question.native,
            "mutation_class": contract.mutation.mutation_class,
        }
        if self._send_arguments:
            context["arguments"] = question.arguments
        return context

    def _body(self, question: Question) -> Json:
        caller, contract = question.caller, question.contract
        context = {**self._context(question), "timestamp": iso(question.now_ms)}
        if self._form == "interlock":
            return {
                "subject": caller.acting,
                "action": "tool.invoke",
                "resource": f"tool:{contract.id}:{contract.version}",
                "context": context,
            }
        facts = {"kind": caller.kind, "trust": caller.trust, "groups": sorted(caller.groups)}
        return {
            "subject": {"type": "agent" if caller.agent else caller.kind, "id": caller.acting, "properties": facts},
            "action": {"name": "tool.invoke"},
            "resource": {"type": "tool", "id": str(contract.id), "properties": {"version": contract.version}},
            "context": context,
        }

    async def _ask(self, question: Question) -> Json:
        import httpx

        body = _encoded(self._body(question))
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._post(body)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError):
            raise Failure("E3205", "the policy engine does not answer") from None
        try:
            document: Any = strict_json(answer)
        except ValueError:
            raise _garbled() from None
        if not isinstance(document, dict):
            raise _garbled()
        return cast("Json", document)

    async def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        async with self._client.stream("POST", self._url, content=body, headers=headers) as response:
            if response.status_code != 200:
                raise Failure("E3205", f"the policy engine answered with status {response.status_code}")
            answer = b""
            async for piece in response.aiter_raw():
                answer += piece
                if len(answer) > MAX_ANSWER:
                    raise Failure("E3205", "the policy engine's answer is too long")
        return answer

    # Understanding the answer

    def _decision(self, answer: Json, question: Question) -> Decision:
        said = answer.get("decision")
        told: Any = answer if self._form == "interlock" else answer.get("context") or {}
        if not isinstance(told, dict):
            raise _garbled()
        if self._form == "authzen":
            if not isinstance(said, bool):
                raise _garbled()
            said = "allow" if said else "deny"
        behavior = _BEHAVIORS.get(said) if isinstance(said, str) else None
        if behavior is None:
            raise _garbled()
        details = cast("Json", told)
        reason, obligations = details.get("reason"), _obligations(details.get("obligations"))
        words = reason if isinstance(reason, str) and reason else f"the policy engine said {behavior}"
        unknown = sorted(obligations - FULFILLED - {"require_approval"})
        if unknown and behavior != "deny":
            behavior, words = "deny", f"the policy engine demands `{unknown[0]}`, which cannot be fulfilled here"
        elif "require_approval" in obligations and behavior == "allow":
            behavior = "ask"
        return Decision(
            behavior=behavior,
            reason=words[:500],
            rules=(),
            policy=f"remote:{self._form}",
            source="remote",
            expires_ms=expiry(question),
            obligations=tuple(sorted(obligations & FULFILLED)),
        )


def _obligations(said: Any) -> frozenset[str]:
    """The names of obligations, each given as text or as an object with an id, name or type."""
    if said is None:
        return frozenset()
    if not isinstance(said, list):
        raise _garbled()
    return frozenset(_name(one) for one in cast("Sequence[Any]", said))


def _name(obligation: Any) -> str:
    if isinstance(obligation, dict):
        known = cast("Json", obligation)
        obligation = known.get("id") or known.get("name") or known.get("type")
    if not isinstance(obligation, str):
        raise _garbled()
    return obligation


def _encoded(document: Json) -> bytes:
    try:
        return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        raise Failure("E3206", "the call holds values that the policy engine cannot be told") from None


def _garbled() -> Failure:
    return Failure("E3205", "the policy engine's answer is not understood")
