"""A version ready to be called: its contract, its function, and values that every call needs, computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interlock.contract.permissions import permissions_of
from interlock.data.defaults import inner_defaults
from interlock.data.fragments import declares_fragments
from interlock.data.schema import Json, Schema
from interlock.data.schema_plan import fitter, taker
from interlock.privacy.redact import SchemaRedactor, property_names

if TYPE_CHECKING:
    from interlock.contract.contract import Contract
    from interlock.contract.declare import Tool


class ToolFacts:
    """The facts of a tool version that decisions about its calls read. They do not need its function."""

    __slots__ = (
        "confined", "contract", "digest", "input_redactor", "isolated", "permissions", "ref", "required_scopes",
        "service", "tier", "writes",
    )  # fmt: skip

    def __init__(self, contract: Contract, digest: str) -> None:
        manifest = contract.manifest
        self.contract = contract
        self.digest = digest
        self.ref = contract.ref
        self.writes = contract.mutation.writes
        self.required_scopes = contract.auth.required_scopes
        self.permissions = permissions_of(contract.auth.required_permissions)
        # Whether paths in its arguments are checked against the permissions it lists.
        self.confined = bool(self.permissions.readable)
        self.isolated = manifest.sandbox is not None
        self.tier = 0 if manifest.sandbox is None else manifest.tier
        self.service = manifest.external_service
        # Redacts its input; compiled by the gateway when first needed.
        self.input_redactor: SchemaRedactor | None = None


class Prepared(ToolFacts):
    """A tool version as the phases use it."""

    __slots__ = (
        "bound",
        "computes",
        "credentials",
        "defaults",
        "dump",
        "executor",
        "facing",
        "fast_path",
        "fits_fast",
        "fits_input",
        "has_checks",
        "has_fragments",
        "has_verifier",
        "inner_defaults",
        "key_from",
        "key_required",
        "max_inline",
        "max_result",
        "members",
        "notice",
        "paged",
        "private",
        "redactor",
        "remote",
        "slow",
        "take",
        "window_s",
    )

    def __init__(self, contract: Contract, bound: Tool[..., Any], digest: str, notice: Json | None = None) -> None:
        super().__init__(contract, digest)
        schema, manifest = contract.input, contract.manifest
        self.bound = bound
        self.notice = notice
        self.paged = manifest.paged
        # The input schema that callers are checked against; without internal fields both are the same.
        self.facing = Schema(schema.caller_facing) if schema.hidden else schema
        self.fits_input: Callable[[Any], bool] = self.facing.fits
        # A fast check for results. If it returns False, the schema decides.
        self.fits_fast = fitter(contract.output.document)
        self.defaults = schema.defaults
        # Those inside of objects and lists; None if there are none.
        self.inner_defaults = inner_defaults(schema)
        self.dump = bound.dump
        # Compiled by the gateway when first needed, as that of its input is.
        self.redactor: SchemaRedactor | None = None
        self.key_required = contract.idempotency.key_required
        # Seconds that the record of a key lives. The settings may make it longer.
        self.window_s = contract.idempotency.window(contract.timeout, 0)
        self.key_from = contract.idempotency.key_from if self.writes else "caller"
        self.credentials = self.permissions.credentials
        # The member names that its results have by contract.
        self.members = frozenset(property_names(contract.output.document))
        # Whether its effect happens where Interlock cannot see it: neither in this process nor in a sandbox.
        self.remote = not self.isolated and not manifest.runs_as.in_process
        # The module that runs it: see contract/executors.py.
        self.executor = manifest.executor
        self.has_fragments = declares_fragments(schema)
        self.has_checks = self.has_fragments or "check" in bound.handlers or "preflight" in bound.handlers
        self.has_verifier = "verify" in bound.handlers
        self.max_inline = manifest.max_inline_chars if manifest.persist_output else None
        self.private = manifest.private_output
        if self.private:
            self.max_inline = 0  # nothing fits, so every result is stored and returned by reference
        self.max_result = manifest.max_result_bytes
        # A tool that only computes runs in its caller's own task; anything that may wait gets a task of its own.
        self.computes = (
            contract.timeout.timeout_class == "interactive"
            and not self.writes
            and not self.isolated
            and not self.remote
        )
        self.slow = contract.timeout.timeout_class in ("long_running", "async")
        # Whether its calls may take the fast path: see gateway/fast_path.py.
        self.fast_path = (
            not (self.writes or self.isolated or self.remote or self.slow) and self.dump is None and notice is None
            and not (self.paged or self.credentials or self.service or self.required_scopes or self.tier)
            and not (self.has_checks or self.has_verifier or self.key_required or self.confined)
            and not manifest.checkpoint_config.enabled
        )  # fmt: skip
        # Checks, copies and writes its input in one pass, if possible.
        rich = None if bound.arguments is None else [name for name, _ in bound.rich]
        self.take = taker(self.facing.document, rich) if self.fast_path else None

    def handler(self, name: str) -> Callable[..., Any] | None:
        return self.bound.handlers.get(name)
