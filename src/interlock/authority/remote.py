"""A remote policy engine, asked over HTTP or gRPC.

There are two forms of the question. `interlock` is our own: `POST {url}/v1/authorize` with subject, action, resource
and context, answered by decision (allow, deny, ask, passthrough), reason and obligations. Over gRPC (a URL with grpc://
or grpcs://) the same question and answer are messages of policy.proto. `authzen` is that of OpenID AuthZEN 1.0, over
HTTP alone: `POST {url}/access/v1/evaluation`, answered by a decision of true or false and a context with reason and
obligations.

An obligation is a condition on a yes. `require_approval` makes it an ask; `alert` and `log` are passed on for the
gateway to fulfil; an unknown obligation makes it a no.

Arguments are redacted before they are sent, unless the operator chose otherwise: values that the tool's schema marks as
sensitive, fields with the name of a secret, credentials in texts.

INVARIANT: anything except a well-formed answer in time (an error, a redirect, a status other than 200 or OK, too many
bytes, a repeated name) is E3205 and is never cached. A decision is cached under everything that the question consisted
of, except for the time of asking. A call with large arguments is not cached: finding it again would cost as much as
asking.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, cast

from interlock.authority.decisions import Memory, Question, expiry
from interlock.authority.remote_wires import GRPC_SCHEMES, GrpcWire, HttpWire, Wire, encoded, garbled
from interlock.call.context import Caller
from interlock.call.phases import Behavior, Decision
from interlock.core.clock import Clock, iso
from interlock.core.threads import WALKS
from interlock.data.bounds import LARGE_INPUT, size_of
from interlock.data.schema import Json
from interlock.privacy.redact import Redactor, SchemaRedactor

Form = Literal["interlock", "authzen"]
Sent = Literal["redacted", "all", "none"]

PATHS: dict[Form, str] = {"interlock": "/v1/authorize", "authzen": "/access/v1/evaluation"}
FULFILLED = frozenset({"alert", "log"})
MOST_OBLIGATIONS = 100
# The subject of the question that only finds out whether the engine answers.
NOBODY = "interlock:readiness"
_MOST_SCHEMAS = 10_000
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
        arguments: Sent = "redacted",
        redactor: Redactor | None = None,
    ) -> None:
        self._wire: Wire
        if url.partition("://")[0] in GRPC_SCHEMES:
            self._wire = GrpcWire(url, token)
        else:
            self._wire = HttpWire(url.rstrip("/") + PATHS[form], token)
        self._form = form
        self._timeout_s = timeout_s
        self._arguments = arguments
        self._redactor = redactor or Redactor()
        self._redactors: dict[str, SchemaRedactor] = {}
        self._memory = Memory(clock.monotonic)
        self._now_ms = clock.now_ms
        self.questions = 0

    def cached_for_every_call(self, caller: Caller, digest: str, now: float, now_ms: int) -> Decision | None:
        """Always None: a remote engine may read anything of a call."""
        return None

    def cached(self, question: Question) -> Decision | None:
        """The cached decision for exactly this question, if any."""
        slot = self._memory.slot(question)
        if slot is None or _is_large(question):
            return None
        return self._memory.get(slot, self._key(question), question.now_ms)

    async def decide(self, question: Question) -> Decision:
        """Ask the engine. E3205 if it does not give a valid answer."""
        known = self.cached(question)
        if known is not None:
            return known
        self.questions += 1
        epoch, large = self._memory.epoch, _is_large(question)
        message = await WALKS.run(self._message, question) if large else self._message(question)
        decision = self._decision(await self._wire.ask(message, self._timeout_s), question)
        if epoch == self._memory.epoch and not large:
            slot = self._memory.slot(question) or self._memory.open(question, None)
            self._memory.put(slot, self._key(question), decision)
        return decision

    async def check(self) -> None:
        """Ask the engine about no call at all. E3205 if it does not give a valid answer, whatever it decides."""
        context: Json = {
            "required_permissions": [], "on_behalf_of": NOBODY, "tenant": "local", "scopes": [],
            "operation": "readiness", "session": "", "door": "operations", "native": None,
            "mutation_class": "read_only", "timestamp": iso(self._now_ms()),
        }  # fmt: skip
        question: Json = {"subject": NOBODY, "action": "tool.invoke", "resource": "tool:interlock.readiness:1.0.0"}
        if self._form == "authzen":
            question = {
                "subject": {"type": "agent", "id": NOBODY},
                "action": {"name": "tool.invoke"},
                "resource": {"type": "tool", "id": "interlock.readiness", "properties": {"version": "1.0.0"}},
            }
        message = self._wire.encode({**question, "context": context})
        self._answered(await self._wire.ask(message, self._timeout_s))

    def forget(self, subjects: Collection[str] | None) -> None:
        """Drop the cached decisions about these callers; None means all."""
        self._memory.forget(subjects)

    async def close(self) -> None:
        """Close the connections."""
        await self._wire.close()

    # Asking

    def _key(self, question: Question) -> bytes:
        context = self._context(question)
        if self._arguments != "none":
            context["arguments"] = question.arguments
        return encoded(context)

    def _message(self, question: Question) -> bytes:
        return self._wire.encode(self._document(question))

    def _context(self, question: Question) -> Json:
        caller, contract = question.caller, question.contract
        return {
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

    def _document(self, question: Question) -> Json:
        caller, contract = question.caller, question.contract
        context = {**self._context(question), "timestamp": iso(question.now_ms)}
        if self._arguments != "none":
            context["arguments"] = self._shown(question)
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
            "resource": {"type": "tool", "id": contract.address, "properties": {"version": contract.version}},
            "context": context,
        }

    def _shown(self, question: Question) -> Any:
        """The arguments as the engine sees them."""
        if self._arguments == "all":
            return question.arguments
        redactor = self._redactors.get(question.digest)
        if redactor is None:
            if len(self._redactors) >= _MOST_SCHEMAS:
                self._redactors.clear()
            redactor = self._redactor.for_schema(question.contract.input.document)
            self._redactors[question.digest] = redactor
        return redactor.for_deciding(question.arguments).value

    # Reading the answer

    def _answered(self, answer: Json) -> tuple[Behavior, Json]:
        """The decision of an answer, and the document with its reason and obligations. E3205 if there is none."""
        decision = answer.get("decision")
        document: Any = answer if self._form == "interlock" else answer.get("context") or {}
        if not isinstance(document, dict):
            raise garbled()
        if self._form == "authzen":
            if not isinstance(decision, bool):
                raise garbled()
            decision = "allow" if decision else "deny"
        behavior = _BEHAVIORS.get(decision) if isinstance(decision, str) else None
        if behavior is None:
            raise garbled()
        return behavior, cast("Json", document)

    def _decision(self, answer: Json, question: Question) -> Decision:
        behavior, details = self._answered(answer)
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


def _obligations(value: Any) -> frozenset[str]:
    """Return the names of obligations, each given as text or as an object with an id, name or type."""
    if value is None:
        return frozenset()
    if not isinstance(value, list) or len(cast("list[Any]", value)) > MOST_OBLIGATIONS:
        raise garbled()
    return frozenset(_name(one) for one in cast("Sequence[Any]", value))


def _name(obligation: Any) -> str:
    if isinstance(obligation, dict):
        known = cast("Json", obligation)
        obligation = known.get("id") or known.get("name") or known.get("type")
    if not isinstance(obligation, str):
        raise garbled()
    return obligation


def _is_large(question: Question) -> bool:
    return size_of(question.arguments, LARGE_INPUT, steps=10_000) > LARGE_INPUT
