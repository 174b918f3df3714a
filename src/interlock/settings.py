"""Settings of an operator, from `settings.toml` in the data directory or INTERLOCK_* variables."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import pydantic
from pydantic_core import PydanticCustomError

from interlock.call.allowances import Budget, LoopLimits, Prices, RateLimit
from interlock.call.channels import Channel
from interlock.call.endpoints import listing_tools
from interlock.call.surface_rules import Excluded, ModelRule, Pinned
from interlock.contract.manifest import Approval, BreakerRule, NetworkPolicy
from interlock.core.errors import Failure
from interlock.core.variables import PREFIX, nearest, variable
from interlock.data import addresses
from interlock.data.bounds import MOST_REQUEST_VALUES
from interlock.data.documents import Malformed, read_json
from interlock.privacy.configured import addresses_that_are_secrets, inline_secrets


def _known_endpoint(name: Any) -> Any:
    if name in listing_tools():
        return name
    *first, last = (repr(one) for one in listing_tools())
    raise PydanticCustomError("literal_error", "Input should be {known}", {"known": f"{', '.join(first)} or {last}"})


# The name of an endpoint where callers list tools.
ListingEndpoint = Annotated[
    str, pydantic.BeforeValidator(_known_endpoint), pydantic.WithJsonSchema({"type": "string", "enum": listing_tools()})
]


class SelectionRule(pydantic.BaseModel):
    """A rule of the tool selection: a request with all of the words, or one that the pattern matches, gets the tool."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)

    tool: Annotated[str, pydantic.Field(min_length=1, max_length=512)]
    words: Annotated[tuple[str, ...], pydantic.Field(max_length=20)] = ()
    pattern: Annotated[str, pydantic.Field(max_length=1000)] = ""

    @pydantic.model_validator(mode="after")
    def _says_when(self) -> SelectionRule:
        if not self.words and not self.pattern:
            raise ValueError("say when the rule fires: words or a pattern")
        if self.pattern:
            addresses.expression(self.pattern)
        return self


class RedactionPattern(pydantic.BaseModel):
    """A pattern of the operator's. Its matches are replaced by the marker; without one, by [NAME_REDACTED]."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: Annotated[str, pydantic.Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    pattern: Annotated[str, pydantic.Field(max_length=1000), pydantic.AfterValidator(addresses.expression)]
    marker: Annotated[str, pydantic.Field(max_length=100)] = ""

    @property
    def rule(self) -> tuple[str, str, str]:
        return self.name, self.pattern, self.marker or f"[{self.name.upper()}_REDACTED]"


class HookSetting(pydantic.BaseModel):
    """A hook of every process on the data directory: the server and each command."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)

    id: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    when: Literal["pre", "post", "failure"]
    run: Annotated[str, pydantic.Field(pattern=r"^[^:]+(\.py)?:[A-Za-z_][A-Za-z0-9_]*$")] = pydantic.Field(
        description="the function: FILE.py:NAME, relative to the data directory, or MODULE:NAME"
    )
    tools: Annotated[str, pydantic.Field(min_length=1, max_length=200)] = "*"
    timeout_s: Annotated[float, pydantic.Field(gt=0, le=3600)] = 1.0


PostgresAddress = Annotated[str, pydantic.AfterValidator(addresses.database_address)]


class Settings(pydantic.BaseModel):
    """Every setting with its default. Unknown names are refused: a misspelt safety setting must not be ignored."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)

    audit: Literal["durable", "batched"] = pydantic.Field(
        "durable",
        description="durable: every record is on disk before the reply. batched: reads reply at once and their records"
        " follow with the next batch; writes stay durable.",
    )
    min_window_s: int = pydantic.Field(3600, ge=1, description="the shortest time an idempotency record lives")
    payload_days: int = pydantic.Field(7, ge=1, description="how long large results are stored")
    keep_inputs: Literal["never", "changed", "always"] = pydantic.Field(
        "changed",
        description="which calls have their inputs stored, encrypted, for payload_days. changed: those whose input was"
        " converted or changed by a hook or a reviewer, up to 256 KiB. always: all calls, of any size within the"
        " payload quotas. never: none. Hashes and sources of changes are on record in any case",
    )
    undo_days: int = pydantic.Field(90, ge=1, description="how long the data for undoing a call is stored")
    checkpoint_bytes: int = pydantic.Field(
        1 << 18, ge=1024, le=16 << 20, description="how many bytes the state of one checkpoint may have"
    )
    checkpoints_per_call: int = pydantic.Field(
        200, ge=1, le=10_000, description="how many checkpoints one call may save; they are stored without a time limit"
    )
    retention_years: int = pydantic.Field(1, ge=1, le=7, description="how long records of reads are stored at least")
    retention_years_writes: int = pydantic.Field(7, ge=1, le=7, description="the same for writes and all other records")
    max_values: int = pydantic.Field(
        MOST_REQUEST_VALUES,
        ge=1000,
        description="how many values one request or call may hold: numbers, texts, members and items at any depth",
    )
    max_result_bytes: int = pydantic.Field(
        16 << 20,
        ge=1000,
        le=1 << 30,
        description="how many bytes of JSON one result may have; a tool's own max_result_bytes can only lower it",
    )
    payload_bytes: int = pydantic.Field(
        16 << 30, ge=1, description="how many bytes of large results and files are stored in the data directory"
    )
    payload_bytes_per_tenant: int = pydantic.Field(4 << 30, ge=1, description="the same of one tenant")
    payload_bytes_per_caller: int = pydantic.Field(1 << 30, ge=1, description="the same of one caller")
    max_background: int = pydantic.Field(
        1000, ge=1, description="how many calls run in the background of one server at once"
    )
    max_background_per_tenant: int = pydantic.Field(500, ge=1, description="the same of one tenant")
    max_background_per_caller: int = pydantic.Field(250, ge=1, description="the same of one caller")
    max_connections_per_peer: int = pydantic.Field(
        1024,
        ge=1,
        description="how many HTTP connections, and how many gRPC connections, one address may hold open; "
        "raise it if a proxy is in front of the server",
    )
    max_mcp_sessions: int = pydantic.Field(
        100, ge=1, description="how many MCP sessions of the handshake era one caller may have open over HTTP"
    )
    max_stale_s: float = pydantic.Field(
        2.0,
        gt=0,
        le=60,
        description="how long calls continue while the store cannot be read and changes of other processes are unknown "
        "(revocations, quarantines, tools); after that they are refused until it can be read",
    )
    purge_records: bool = pydantic.Field(
        False,
        description="remove records that are past their term in the background, once a day; otherwise they stay until"
        " interlock audit purge removes them",
    )
    backup_to: Annotated[str, pydantic.BeforeValidator(addresses.backup_place)] | None = pydantic.Field(
        None,
        description="a folder outside the data directory, best on another disk, or an address s3://BUCKET/PREFIX, to"
        " which a server makes backups by itself; each is verified",
    )
    backup_every_h: float = pydantic.Field(24.0, gt=0, le=744, description="how often it makes one, in hours")
    backup_days: int = pydantic.Field(
        30,
        ge=1,
        le=3650,
        description="after how many days such a backup is removed from a folder; the newest one always stays",
    )
    backup_tier: Literal["hot", "warm", "cold"] = pydantic.Field(
        "warm",
        description="how long such a backup is kept in an object store: hot 1 hour, warm 90 days, cold 7 years",
    )
    archive_to: str = pydantic.Field(
        "",
        pattern=r"^(s3://[^/?#@]+(/[^?#]*)?)?$",
        description="an address s3://BUCKET/PREFIX. Records that are past their term, and checkpoints at milestones"
        " that are older than checkpoint_days, are written there, for 7 years, before the store lets go of them. Empty:"
        " records go without, and checkpoints stay in the store",
    )
    archive_secret: str = pydantic.Field(
        "",
        max_length=200,
        description="the name of the stored credential, KEY_ID:SECRET, with which servers and commands use an object"
        " store. Empty: that of the environment, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    )
    checkpoint_days: int = pydantic.Field(
        90, ge=1, le=3650, description="after how many days checkpoints at milestones go to archive_to"
    )
    strict_redaction: bool = pydantic.Field(
        False, description="also redact text that only looks like a number or an address"
    )
    redact_names: tuple[str, ...] = pydantic.Field((), description="further field names whose values are never shown")
    redact_patterns: tuple[RedactionPattern, ...] = pydantic.Field(
        (),
        description="further patterns whose matches are never shown: name, pattern (a regular expression) and, if the"
        " name does not say enough, marker",
    )
    no_pattern_redaction: tuple[str, ...] = pydantic.Field(
        (), description="namespaces whose results are not redacted by patterns"
    )

    counter: Annotated[str, pydantic.Field(pattern=r"^(estimate|o200k|cl100k|[^:]+:[A-Za-z_][A-Za-z0-9_]*)$")] = (
        pydantic.Field(
            "estimate",
            description="how tokens of a context window are counted. estimate: from the text, with 10 % added."
            " o200k and cl100k: exactly, for models of OpenAI; they need the package rs-bpe. FILE.py:NAME (relative to"
            " the data directory) or MODULE:NAME: a function of your own that takes a text and returns a whole number",
        )
    )

    environment: str = pydantic.Field(
        "local", description="the environment: local, dev, test and staging are not production; every other name is"
    )
    theta_auto: int = pydantic.Field(
        50, ge=0, le=100, description="the trust from which on a caller's reversible writes need no approval"
    )
    sigma_critical: Literal["field", "resource", "collection", "tenant", "system"] = pydantic.Field(
        "collection",
        description="the scope from which on a write in production needs approval, narrowest first",
    )
    approval_otherwise: Literal["policy", "yes"] = pydantic.Field(
        "policy",
        description="who decides if no rule of the approval gate applies: policy, or (yes) a person",
    )
    ask_all_writes: bool = pydantic.Field(False, description="require approval for every write")
    approval: Approval = pydantic.Field(
        Approval.model_construct(),  # without a validator, which would be built when this module is imported
        description="the approvers, the escalation, and the time after which a call is denied; tools may override it",
    )
    four_eyes: Literal["irreversible", "always", "never"] = pydantic.Field(
        "irreversible",
        description="for which calls nobody on whose behalf they were made may decide; the requester never may",
    )
    max_waiting: int = pydantic.Field(100, ge=1, description="how many calls of one requester may wait for approval")
    resume_approved: bool = pydantic.Field(
        False, description="resume approved calls of all callers in this process; a server does"
    )
    channels: tuple[Channel, ...] = pydantic.Field(
        (), description="the channels by which approvers are notified; see notifications"
    )
    notify_timeout_s: float = pydantic.Field(
        10.0,
        gt=0,
        le=300,
        description="how long one attempt may take to notify by a channel with a url; its process is killed then",
    )
    hooks: tuple[HookSetting, ...] = pydantic.Field(
        (),
        description="functions around the calls of all processes: id, when, run, tools, timeout_s",
    )

    token_issuer: str = pydantic.Field("interlock", description="the name of our own issuer in tokens")
    token_audience: str = pydantic.Field("interlock", description="the audience that tokens must have to be accepted")
    token_max_s: int = pydantic.Field(86_400, ge=1, description="the longest lifetime of a token")
    trusted_issuers: tuple[dict[str, Any], ...] = pydantic.Field(
        (),
        description="other accepted issuers: iss, jwks (a file, relative to the data directory, or an https address),"
        " algorithms, audience, ignored_claims",
    )

    policy_engine: Literal["embedded", "remote"] = pydantic.Field(
        "embedded",
        description="the engine: the Cedar policies of the data directory, or a remote one over HTTP or gRPC",
    )
    policy_url: Annotated[str, pydantic.AfterValidator(addresses.engine_address)] = pydantic.Field(
        "",
        description="the remote engine: https://HOST/PATH or grpcs://HOST:PORT; http and grpc without TLS",
    )
    policy_form: Literal["interlock", "authzen"] = pydantic.Field(
        "interlock",
        description="the protocol: our own question (POST /v1/authorize, or the gRPC service PolicyEngine), or"
        " the AuthZEN evaluation API, which is HTTP only",
    )
    policy_arguments: Literal["redacted", "all", "none"] = pydantic.Field(
        "redacted",
        description="which arguments the remote engine sees. redacted: without credentials and what is marked or named"
        " as private. all: as the caller sent them. none: no arguments",
    )
    policy_timeout_s: float = pydantic.Field(2.0, gt=0, le=30, description="the timeout of the remote engine")
    policy_token_file: Path | None = pydantic.Field(None, description="a file with the bearer token for it")

    store: str = pydantic.Field(
        "",
        pattern=r"^(postgres(ql)?://.*)?$",
        description="the database: empty for a file of the data directory, or the address of a PostgreSQL database,"
        " postgresql://USER@HOST/NAME; its password is in a file of PostgreSQL's client (~/.pgpass, PGPASSFILE), or in"
        " PGPASSWORD",
    )
    store_admin: str = pydantic.Field(
        "",
        pattern=r"^(postgres(ql)?://.*)?$",
        description="the same database as the role that owns its tables, which makes and changes them. The role of"
        " `store` is then given no right to change or remove a record. Empty: the role of `store` owns them",
    )

    redis: Annotated[str, pydantic.AfterValidator(addresses.redis_address)] = pydantic.Field(
        "",
        description="a Redis server that tells other processes of changes sooner than they would read them from the"
        " store: redis://USER@HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH. Empty: none",
    )
    redis_secret: str = pydantic.Field(
        "", max_length=200, description="the name of the stored credential that is its password"
    )

    shared_config: bool = pydantic.Field(
        False,
        description="take policy, principals and all settings that machines must share from the store, where"
        " interlock config push puts them, and not from the files here. settings.toml then states only what is of this"
        " machine",
    )

    secrets: Literal["embedded", "vault"] = pydantic.Field("embedded", description="the store of credentials")
    secrets_key: Literal["file", "keyring"] = pydantic.Field(
        "file",
        description="where their sealing key is: a file of the data directory, or the operating system's keyring",
    )
    vault_url: str = pydantic.Field("", description="the address of Vault")
    vault_mount: str = pydantic.Field("secret", description="the mount of its KV version 2 engine")
    vault_prefix: str = pydantic.Field("", description="the path prefix of credentials")
    vault_token_file: Path | None = pydantic.Field(
        None, description="a file with the token for Vault; without it, the variable VAULT_TOKEN"
    )
    vault_namespace: str | None = pydantic.Field(None, description="the Vault namespace, where there are several")
    vault_issued: dict[str, str] = pydantic.Field(
        {}, description="names of credentials that Vault issues for each call, and the paths that issue them"
    )

    egress: NetworkPolicy = pydantic.Field(
        NetworkPolicy.model_construct(),
        description="the hosts and ports that sandboxed tools may reach at all; a tool's manifest must list them too",
    )
    egress_of: dict[str, NetworkPolicy] = pydantic.Field(
        {},
        description="the same for one agent, by its id, in place of `egress`; it must list the upstreams it calls too",
    )

    sandbox_grace_s: float = pydantic.Field(
        0.2,
        ge=0,
        le=1,
        description="how long sandboxed code may clean up once its call was cancelled or is out of time; 0 kills it at "
        "once",
    )

    deprecation_extend_days: int = pydantic.Field(
        7,
        ge=0,
        le=365,
        description="days by which the removal of a deprecated version is put off while it is still in use; 0 removes "
        "it all the same",
    )

    upstream_probe_s: float = pydantic.Field(
        60.0, gt=0, le=300, description="how often upstreams are probed, in seconds"
    )

    breakers: tuple[BreakerRule, ...] = pydantic.Field(
        (), description="when calls to failing services are refused, by service and tool; see limits"
    )

    watched_files: tuple[Path, ...] = pydantic.Field(
        (), description="directories in which every change of a call is compared with its tool's manifest"
    )
    watched_databases: tuple[Path, ...] = pydantic.Field(
        (), description="SQLite files that are watched in the same way"
    )
    watched_postgres: tuple[PostgresAddress, ...] = pydantic.Field(
        (),
        description="Postgres databases that are watched in the same way, as postgresql://HOST/DATABASE; not restored",
    )

    search_encoder: Annotated[str, pydantic.AfterValidator(addresses.encoder)] = pydantic.Field(
        "auto",
        description="what finds tools by their meaning. auto: the package interlock-search-encoder if it is installed,"
        " otherwise the table of this package. table; package; none: words alone. A folder with model.onnx and"
        " vocab.txt or tokenizer.json, absolute or in the data directory. ollama:MODEL@URL or openai:MODEL@URL: a"
        " service, which receives the descriptions of tools and the requests",
    )
    search_vectors: Literal["memory", "store"] = pydantic.Field(
        "memory",
        description="where vectors of tools are that an encoder made. memory: of each process, with a file of the data"
        " directory. store: in the database, where it is PostgreSQL with pgvector, which then compares them",
    )
    search_encoder_secret: str = pydantic.Field(
        "", max_length=200, description="the name of the stored credential that such a service receives as its bearer"
    )

    surface: Literal["auto", "all", "search"] = pydantic.Field(
        "auto",
        description="what clients list at surface_doors. all: every tool that the caller may use. search: search_tools,"
        " load_tools, pinned and loaded tools. auto: all, as long as there are no more than surface_most",
    )
    surface_most: int = pydantic.Field(100, ge=1, le=10_000, description="see surface")
    surface_doors: tuple[ListingEndpoint, ...] = pydantic.Field(
        ("mcp",), description="the endpoints where surface counts. At the others callers list and call all their tools"
    )
    surface_pinned: tuple[Pinned, ...] = pydantic.Field(
        (),
        description="tools that are always listed: tools, by name, and groups or callers, for these alone",
    )
    surface_excluded: tuple[Excluded, ...] = pydantic.Field(
        (),
        description="tools that do not exist for callers of any endpoint: tools, by name or pattern, groups or callers,"
        " for these alone, needs, for models that lack one of these capabilities alone, and reason: feature_disabled,"
        " model_unsupported or recursive_tool_forbidden",
    )
    surface_models: tuple[ModelRule, ...] = pydantic.Field(
        (),
        description="what the models of callers can do: capabilities, such as tool_calls and image_input, and groups or"
        " callers, for these alone. The first rule about a caller counts; without one it is tool_calls",
    )
    surface_unloaded: Literal["refuse", "load"] = pydantic.Field(
        "refuse",
        description="what becomes of a call of a tool whose schema was not loaded. refuse: E3107. load: it is loaded,"
        " and the call is made",
    )

    selection_rules: tuple[SelectionRule, ...] = pydantic.Field(
        (), description="requests that always get one tool: tool, and words or a pattern (a regular expression)"
    )
    selection_requests: Literal["sealed", "never"] = pydantic.Field(
        "sealed",
        description="whether requests for which tools were selected are stored, encrypted, for payload_days. The router"
        " is trained on them, and selections are measured by them",
    )
    selection_searches: bool = pydantic.Field(
        False,
        description="whether searches for tools are stored as selection_requests says, so that the router learns from"
        " those that were followed by a call of a tool that they found",
    )
    selection_model: Annotated[str, pydantic.AfterValidator(addresses.chat_model)] = pydantic.Field(
        "",
        description="a model that chooses among the candidates of a selection, with an OpenAI-compatible API:"
        " openai:MODEL@URL. It receives the request and the declarations of the candidates. Empty: none",
    )
    selection_model_secret: str = pydantic.Field(
        "", max_length=200, description="the name of the stored credential that it receives as its bearer"
    )
    selection_model_per_minute: int = pydantic.Field(
        60,
        ge=1,
        le=10_000,
        description="how many selections of a caller ask that model in any minute; others are refused (E3003)",
    )
    selection_token_price: float = pydantic.Field(
        3.0,
        ge=0,
        le=1_000_000,
        allow_inf_nan=False,
        description="what a million tokens cost that a model reads, in the unit in which tools state their costs. The"
        " reports about selections add it to the costs of calls",
    )
    recommend_callers: int = pydantic.Field(
        3, ge=1, le=1000, description="how many other callers must have used a tool for it to be recommended"
    )
    selection_dangers: Literal["deny", "ask"] = pydantic.Field(
        "deny",
        description="the answer of a selection's gate to dangerous operations in the parameters, such as DROP TABLE",
    )

    budgets: tuple[Budget, ...] = pydantic.Field((), description="limits on the total cost of calls; see limits")
    rate_limits: tuple[RateLimit, ...] = pydantic.Field(
        (), description="limits on the number of calls per period; see limits"
    )
    prices: Prices = pydantic.Field(Prices.model_construct(), description="prices of metered use")
    loops: LoopLimits = pydantic.Field(
        LoopLimits.model_construct(),
        description="the number of calls from which on a loop is suspected",
    )

    mcp_task_after_s: float = pydantic.Field(
        5.0,
        gt=0,
        le=86_400,
        description="after how many seconds a call of an MCP client that takes tasks becomes one: the client gets a"
        " handle, and asks for the result later",
    )
    mcp_session_idle_s: float = pydantic.Field(
        300.0,
        gt=0,
        le=86_400,
        description="after how many seconds without a request or an open stream an MCP session (handshake era) ends;"
        " the next request of its client opens it again",
    )

    trace_ratio: float | None = pydantic.Field(
        None,
        ge=0,
        le=1,
        description="the share of traces that are recorded; by default all where there is a collector, else none",
    )
    otlp_endpoint: str = pydantic.Field(
        "", description="the OTLP/HTTP collector that spans are sent to, say http://localhost:4318"
    )
    traces_kept: int = pydantic.Field(
        1000, ge=1, le=100_000, description="the number of calls whose spans can be read back from this process"
    )
    log_format: Literal["text", "json"] = pydantic.Field("text", description="the format of a server's log")
    log_level: Literal["debug", "info", "warning", "error"] = pydantic.Field(
        "info", description="the lowest level that a server logs"
    )

    keep_environment: tuple[str, ...] = pydantic.Field(
        (),
        description="environment variables with credentials that tools in the process of interlock serve and interlock"
        " call may see; all others are removed before tools run",
    )
    housekeeping: bool = pydantic.Field(
        True,
        description="remove expired idempotency keys and payloads and retire versions in the background, once an hour",
    )

    @pydantic.field_validator("policy_form")
    @classmethod
    def _form_has_wire(cls, form: str, info: pydantic.ValidationInfo) -> str:
        if form == "authzen" and str(info.data.get("policy_url", "")).startswith("grpc"):
            raise ValueError("AuthZEN is asked over HTTP; use `interlock` with a grpc address")
        return form

    @pydantic.field_validator("policy_token_file")
    @classmethod
    def _token_is_hidden(cls, token: Path | None, info: pydantic.ValidationInfo) -> Path | None:
        parts = urlsplit(str(info.data.get("policy_url", "")))
        if token is not None and parts.scheme in ("http", "grpc") and not addresses.is_here(parts.hostname or ""):
            raise ValueError("the token would travel in clear text; use an https or grpcs address")
        return token

    @pydantic.field_validator("search_encoder_secret", "selection_model_secret", "redis_secret")
    @classmethod
    def _credential_is_hidden(cls, name: str, info: pydantic.ValidationInfo) -> str:
        address = str(info.data.get((info.field_name or "").removesuffix("_secret"), ""))
        url = urlsplit(address if address.startswith("redis") else address.rpartition("@")[2])
        if name and url.scheme in ("http", "redis") and not addresses.is_here(url.hostname or ""):
            raise ValueError(
                f"the credential would travel in clear text; use {addresses.ENCRYPTED[url.scheme]} address"
            )
        return name

    @property
    def backup_every_ms(self) -> int:
        return round(self.backup_every_h * 3_600_000)


def load_settings(path: Path, **given: Any) -> Settings:
    """Settings from the file, overridden by the environment, overridden by what the program was given.

    E3108 for a setting that cannot be used, with its source: the line of the file, the variable or the argument.
    """
    return effective_settings(path, **given)[0]


def effective_settings(path: Path, **given: Any) -> tuple[Settings, dict[str, str]]:
    """The same, with the source of each setting that is not a default."""
    try:
        text = path.read_text() if path.exists() else ""
        values: dict[str, Any] = tomllib.loads(text)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise Failure("E3108", f"settings.toml cannot be read: {reason}", resolution=_CORRECT) from None
    for name in _named_by_environment():
        values[name] = _from_environment(name, os.environ[variable(name)])
    if not values and not given:
        return _defaults(), {}
    stated = {name: one for name, one in values.items() if name not in given}
    faults = [f"{_place('', loc, text, given)}: {words}" for loc, words in credential_faults(stated)]
    settings: Settings | None = None
    try:
        # What the file states has to be of its type: the text "7" is not a number. A variable is always a text.
        in_file = {name: one for name, one in stated.items() if variable(name) not in os.environ}
        Settings.model_validate_json(json.dumps(in_file, default=str), strict=True)
        settings = Settings.model_validate({**values, **given})
    except pydantic.ValidationError as error:
        faults += [
            f"{_place(one['type'], one['loc'], text, given)}: {fault_words(one['type'], one['loc'], one['msg'])}"
            for one in error.errors(include_url=False, include_input=False, include_context=False)
        ]
    if faults or settings is None:
        raise Failure("E3108", "; ".join(faults[:_MOST]), details={"faults": faults}, resolution=_CORRECT)
    return settings, {name: _place("", (name,), text, given) for name in {**values, **given}}


@cache
def _defaults() -> Settings:
    """The defaults, without a validator, which takes some time to build."""
    return Settings.model_construct()


def _named_by_environment() -> list[str]:
    """The settings that the environment states, in their order."""
    stated = {name for name in os.environ if name.startswith(PREFIX)}
    return [name for name in Settings.model_fields if variable(name) in stated] if stated else []


_MOST = 5


# Settings that say what to look for: an expression may have the form of what it finds.
_EXPRESSIONS = frozenset({"redact_patterns", "redact_names", "selection_rules"})
_KEEP_APART = "keep it apart, in a file or under `interlock secrets set`, and name that here (a database's: PGPASSFILE)"
_CORRECT = "correct what is named, or remove it; the settings reference describes each one; then: interlock doctor"


def credential_faults(values: Mapping[str, Any]) -> list[tuple[tuple[int | str, ...], str]]:
    """The places of values that hold a credential themselves, and what to do about each."""
    found = [*inline_secrets({name: one for name, one in values.items() if name not in _EXPRESSIONS})]
    found += [place for place in addresses_that_are_secrets(values.get("channels")) if place not in found]
    return [(loc, f"`{'.'.join(map(str, loc))}` holds a credential; {_KEEP_APART}") for loc in found]


def fault_words(kind: str, loc: tuple[int | str, ...], message: str) -> str:
    """A fault that pydantic found, in a sentence that names the setting."""
    where = ".".join(map(str, loc))
    if kind == "extra_forbidden":
        meant = nearest(str(loc[-1]), _names_beside(loc))
        return f"there is no setting `{where}`" + (f"; did you mean `{meant}`?" if meant else "")
    if kind == "missing":
        return f"`{where}` is missing"
    return f"`{where}` cannot be used: {message.removeprefix('Value error, ').lower()}"


def _names_beside(loc: tuple[int | str, ...]) -> Iterable[str]:
    """The settings that could stand in the place of the last of these names."""
    model: type[pydantic.BaseModel] | None = Settings
    for part in loc[:-1]:
        if model is not None and isinstance(part, str):
            field = model.model_fields.get(part)
            model = None if field is None else _model_in(field.annotation)
    return () if model is None else model.model_fields


def _model_in(annotation: Any) -> type[pydantic.BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _place(kind: str, loc: tuple[int | str, ...], text: str, given: Mapping[str, Any]) -> str:
    """The source of a setting: the program, a variable, or a line of the file."""
    name = str(loc[0])
    if name in given:
        return "what the program was given"
    if name in Settings.model_fields and variable(name) in os.environ:
        return variable(name)
    place = loc[:-1] if kind == "missing" else loc
    return f"settings.toml, line {line_of(text.splitlines(), place)}"


def line_of(lines: list[str], loc: tuple[int | str, ...]) -> int:
    """The line of a setting, or the nearest one above that leads there."""
    at, pattern = 0, re.compile("")
    for part in loc:
        if isinstance(part, str):
            pattern = re.compile(rf"[^#=]*\b{re.escape(part)}\b")
        skip = part if isinstance(part, int) else 0
        matching = [number for number, line in enumerate(lines, 1) if number >= at and pattern.match(line)]
        at = matching[min(skip, len(matching) - 1)] if matching else at
    return max(at, 1)


def _from_environment(name: str, text: str) -> Any:
    """Read the value of a variable: plain, a list with commas, or JSON if it has parts."""
    default = Settings.model_fields[name].default
    if isinstance(default, pydantic.BaseModel | dict) or (isinstance(default, tuple) and text.startswith("[")):
        try:
            return read_json(text)
        except Malformed as error:
            raise Failure("E3108", f"{variable(name)}: {error}", resolution=_CORRECT) from None
    return [part for part in text.split(",") if part] if isinstance(default, tuple) else text
