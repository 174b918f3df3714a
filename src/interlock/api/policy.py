"""Operations on the policy: show, check, explain, test and apply."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from interlock.api.files import keep
from interlock.api.policy_faults import faults_of
from interlock.api.rights import require_here
from interlock.api.shared_config import POLICY, SharedConfiguration
from interlock.authority.facts import in_normal_form
from interlock.call.context import Caller
from interlock.core.clock import new_id
from interlock.core.errors import Failure
from interlock.data.schema import Json, pointer
from interlock.store import decisions, records

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.approvals.standing import Standing
    from interlock.authority.decisions import Question
    from interlock.authority.policy_check import Fault
    from interlock.call.phases import Decision
    from interlock.contract.contract import Contract
    from interlock.store.port import Transaction


class Policy:
    """Reads, checks, explains and changes the policy, for callers who may."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def show(self, *, by: Caller) -> Json:
        """The rules in force, with their source text."""
        _require_policy(by)
        return rules_document(self._parts)

    async def check(self, text: str, *, by: Caller) -> Json:
        """Check a policy text against the registered tools and the arguments that they take."""
        _require_policy(by)
        faults = await faults_of(self._parts, text)
        return {
            "usable": not any(fault.grave for fault in faults),
            "faults": [fault_document(fault) for fault in faults],
        }

    async def explain(
        self, *, by: Caller, door: str, principal: str, tool: str, arguments: Json, operation: str = "invoke"
    ) -> Json:
        """Why a principal may make a call, or may not: the rule that decides, and what would have to change."""
        _require_policy(by)
        return await explain_call(self._parts, by, principal, tool, arguments, operation=operation, door=door)

    async def test(self, cases: Sequence[Json], *, by: Caller, door: str) -> Json:
        """Compare the decision on each case with the one that it expects."""
        _require_policy(by)
        return await run_cases(self._parts, by, cases, door=door)

    async def apply(self, text: str, *, by: Caller, instead_of: str | None = None) -> Json:
        """Make a text the policy if it has no faults (E3004 with all of them).

        With `instead_of`, only if the policy in force has that digest (E3410).
        """
        require_here(by, "policy:admin", "changing the policy")
        path, shared = self._parts.policy.path, self._parts.home.shared
        replaces = shared is None and path.exists()
        before = shared.files[POLICY] if shared else path.read_text(errors="replace") if replaces else ""
        digests = [hashlib.sha256(one.encode()).hexdigest() for one in (before, text)]
        if instead_of is not None and instead_of != self._parts.policy.rules.digest:
            raise Failure("E3410", "the policy was changed meanwhile; read it again")
        faults = await faults_of(self._parts, text)
        if any(fault.grave for fault in faults):
            report = "; ".join(f"line {fault.line}: {fault.message}" for fault in faults if fault.grave)
            details = {"faults": [fault_document(fault) for fault in faults]}
            raise Failure("E3004", f"the policy cannot be used: {report}", details=details)
        parts = self._parts
        diff = difflib.unified_diff(before.splitlines(), text.splitlines(), "in force", "new", lineterm="")
        report = {
            "applied": True,
            "changed": before != text,
            "previous_kept": replaces,
            "diff": list(diff),
            "faults": [fault_document(fault) for fault in faults],
        }
        if shared is not None:  # for all machines, as a version of the configuration that they share
            await SharedConfiguration(parts).push({POLICY: text}, by=by, instead_of=shared.version)
            return report
        ref = new_id(parts.clock.now_ms(), parts.clock.random_bytes(8))

        def unit(transaction: Transaction) -> None:
            body = records.plain(
                "authority", ref, transaction.now_ms, act="policy.applied", by=by.acting, before=digests[0],
                after=digests[1],
            )  # fmt: skip
            transaction.append("authority", ref, body)

        # The record comes first: there must be no policy in force without a record of the person who applied it.
        await parts.journal.commit(unit)
        if replaces:
            keep(path.with_name(f"{path.name}.previous"), before.encode())
        keep(path, text.encode())
        parts.messages.policy_changed(None)
        return report

    async def forget(self, subjects: Sequence[str] | None, *, by: Caller) -> Json:
        """Let every process on the store drop its cached decisions about some subjects; None for everybody.

        For decisions that depend on something else than the files of the data directory: those of a policy engine.
        """
        require_here(by, "policy:admin", "dropping decisions")
        parts = self._parts
        named = None if subjects is None else sorted(set(subjects))
        if named is not None and len(named) > decisions.MOST_SUBJECTS:
            raise Failure(
                "E3004", f"at most {decisions.MOST_SUBJECTS} subjects can be named; name none to drop everything"
            )
        ref = new_id(parts.clock.now_ms(), parts.clock.random_bytes(8))

        def unit(transaction: Transaction) -> None:
            decisions.drop(transaction, named)
            body = records.plain(
                "authority", ref, transaction.now_ms, act="policy.forgotten", by=by.acting, subjects=named
            )
            transaction.append("authority", ref, body)

        await parts.journal.commit(unit)
        parts.messages.policy_changed(named)
        await parts.journal.changes.look()
        return {"forgotten": True, "subjects": named}


def shared_text(parts: Parts) -> str | None:
    """The policy that all machines share; None for a data directory with a policy of its own."""
    return None if parts.home.shared is None else parts.home.shared.files[POLICY]


def _require_policy(by: Caller) -> None:
    require_here(by, "policy:admin" if "policy:admin" in by.scopes else "policy:read", "looking at the policy")


def rules_document(parts: Parts) -> Json:
    """The rules in force: the whole text, and each rule with its place in it."""
    rules = parts.policy.rules
    return {
        "version": rules.version,
        "digest": rules.digest,
        "text": rules.text,
        "rules": [{"id": rule.id, "effect": rule.effect, "line": rule.line, "text": rule.text} for rule in rules.rules],
    }


def fault_document(fault: Fault) -> Json:
    """The JSON form of a fault."""
    return {"line": fault.line, "rule": fault.rule, "message": fault.message, "grave": fault.grave}


async def somebody(parts: Parts, who: str) -> Caller:
    """The caller for a principal: an identity by name or DID, or an id that principals.toml names."""
    known = await parts.identities.find(who)
    if known is None and not parts.policy.knows(who):
        # Somebody unknown cannot make a call, so any decision would be misleading.
        raise Failure("E3207", f"nobody is known as `{who}`: name an identity, or an id that principals.toml names")
    if known is None:
        return parts.policy.principal(who)
    return Caller(id=known.did, tenant=known.tenant, kind=known.kind, trust=known.trust, groups=known.groups)


async def explain_call(
    parts: Parts, by: Caller, principal: str, tool: str, arguments: Json, *, operation: str = "invoke", door: str
) -> Json:
    """The decision on a call that is not made. The principal `me` stands for the caller who asks."""
    question = await question_of(parts, await _principal(parts, principal, by), tool, arguments, operation, door)
    found = parts.policy.explain(question)
    decision = found.decision
    stricter = asked_all_the_same(parts, question, decision)
    return {
        "principal": question.caller.acting,
        "tool": question.contract.ref,
        "behavior": (stricter or decision).behavior,
        "reason": decision.reason,
        "rules": list(decision.rules),
        "policy": decision.policy,
        "would_have_to_change": list(found.advice),
        "gate": None if stricter is None else stricter.reason,
        "standing": await _standing(parts, question),
        "considered": [
            {
                "id": view.rule.id,
                "effect": view.rule.effect,
                "line": view.rule.line,
                "text": view.rule.text,
                "holds": view.holds,
                "holds_when_approved": view.holds_approved,
            }
            for view in found.rules
        ],
    }


async def _standing(parts: Parts, question: Question) -> list[Json]:
    """The standing approvals of this tool for this caller that can still be used, and whether they cover the call."""
    caller, contract, now_ms = question.caller, question.contract, parts.clock.now_ms()
    normal = partial(in_normal_form, contract)

    def fits(one: Standing) -> bool:
        return one.fits(caller, contract.address, contract.version, question.arguments, now_ms, normal)

    found = await parts.standing_approvals.list()
    mine = [one for one in found if (one.tenant, one.tool) == (caller.tenant, contract.address) and one.is_for(caller)]
    return [
        {**one.document(), "covers": fits(one)}
        for one in mine
        if one.revoked_ms is None and one.used < one.uses and now_ms < one.expires_ms
    ]


async def run_cases(parts: Parts, by: Caller, cases: Sequence[Json], *, door: str) -> Json:
    """Compare the decision on each case with its `expect` and, where it names one, its `rule`.

    A case may say when (`at`), through which endpoint (`door`) and with how much left to spend (`budget_left`) its call
    is made. Otherwise it is made now, through the endpoint that asks, with nothing spent and nothing left.
    """
    rows = [await _run_case(parts, by, case, door) for case in cases]
    return {"cases": rows, "failed": sum(not row["passed"] for row in rows)}


async def _run_case(parts: Parts, by: Caller, case: Json, door: str) -> Json:
    principal, tool = str(case.get("principal") or "me"), str(case["tool"])
    operation = str(case.get("operation") or "invoke")
    arguments: Json = case.get("arguments") or {}
    caller = await _principal(parts, principal, by)
    question = await question_of(parts, caller, tool, arguments, operation, str(case.get("door") or door))
    at, left = case.get("at"), int(case.get("budget_left") or 0)
    now_ms = question.now_ms if at is None else _milliseconds(str(at))
    ruled = parts.policy.judge(replace(question, now_ms=now_ms, budgets=(0, left)))
    decision = asked_all_the_same(parts, question, ruled) or ruled
    rule = case.get("rule")
    return {
        "principal": principal,
        "tool": tool,
        "expect": case["expect"] + (f" by {rule}" if rule else ""),
        "answer": decision.behavior,
        "why": decision.reason,
        "rules": list(decision.rules),
        "passed": decision.behavior == case["expect"] and rule in (None, *decision.rules),
    }


def _milliseconds(at: str) -> int:
    """A time with its zone, as milliseconds since 1970. E3004 for anything else."""
    try:
        time = datetime.fromisoformat(at)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise Failure("E3004", f"`at` is a time with its zone, such as 2026-11-17T23:30:00Z: not `{at}`")
    return int(time.timestamp() * 1000)


async def _principal(parts: Parts, name: str, by: Caller) -> Caller:
    return by if name == "me" else await somebody(parts, name)


async def question_of(parts: Parts, caller: Caller, tool: str, arguments: Json, operation: str, door: str) -> Question:
    """The question to the policy for a call; E3301 for arguments that no such call could have."""
    from interlock.authority.decisions import Question

    name, at, spec = tool.partition("@")
    version = await parts.catalog.resolve(name, spec if at else None)
    return Question(
        caller, version.contract, version.row.digest, arguments_of(version.contract, arguments), operation, "", door,
        None, (0, 0), parts.clock.now_ms(),
    )  # fmt: skip


def arguments_of(contract: Contract, arguments: Json) -> Json:
    """Return arguments as the tool would get them. Missing ones without a default stay missing: rules may not need
    them.
    """
    return {**dict(contract.input.defaults), **_fitting(contract, arguments)}


def asked_all_the_same(parts: Parts, question: Question, decision: Decision) -> Decision | None:
    """The stricter decision where a person is asked although no rule requires it; None if there is none."""
    from interlock.authority.approval_gate import Gate, gate

    if question.operation == "preview":
        return None  # a preview needs no approval
    manifest = question.contract.manifest
    tier = 0 if manifest.sandbox is None else manifest.tier
    thresholds = Gate.of(parts.settings)
    return gate(decision, question.contract, trust=question.caller.trust, settings=thresholds, tier=tier)


def _fitting(contract: Contract, arguments: Json) -> Json:
    if not arguments:
        return {}
    from interlock.data.defaults import converted_and_filled
    from interlock.data.explain import input_faults
    from interlock.data.schema import Schema

    schema = Schema(contract.input.caller_facing)
    given, filled = converted_and_filled(schema, contract.input, arguments)
    pointers = {pointer([name]) for name in arguments}
    wrong = input_faults(schema, given)
    at_fault = [one for one in wrong if not one.pointer or f"/{one.pointer.split('/')[1]}" in pointers]
    if at_fault:
        listing = "; ".join(f"{one.pointer.lstrip('/') or 'input'}: {one.message}" for one in at_fault[:10])
        details = {"faults": [one.document() for one in at_fault], "tool": contract.ref}
        raise Failure("E3301", listing, details=details)
    return filled
