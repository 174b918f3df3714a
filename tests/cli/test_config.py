"""`interlock config`: one file and variables of the environment, checked before a start, shown without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import httpx
import pytest
from pydantic import BaseModel

from interlock import Failure, Interlock
from interlock.contract.manifest import CircuitBreakerConfig, RetryPolicy
from interlock.core.variables import variable
from interlock.default_settings import Defaults, defaults_if_unstated
from interlock.privacy.configured import masked
from interlock.settings import Settings, effective_settings, load_settings
from tests.support.cli import PATIENCE_S, Cli, running

OPEN = "numbers of parts that are not built"

# A text for each variable whose type does not tell one. The others are changed by their type.
TEXTS = {
    "backup_to": "/backups",
    "archive_to": "s3://backups/interlock",
    "archive_secret": "objects",
    "redact_names": "iban,passport",
    "redact_patterns": '[{"name": "staff", "pattern": "EMP-[0-9]+"}]',
    "no_pattern_redaction": "mail,contacts",
    "counter": "o200k",
    "environment": "prod",
    "approval": '{"timeout_seconds": 600}',
    "channels": '[{"name": "desk", "console": true}]',
    "hooks": '[{"id": "log", "when": "post", "run": "hooks.py:log"}]',
    "token_issuer": "house",
    "token_audience": "tools",
    "trusted_issuers": '[{"iss": "https://id.example.com", "jwks": "keys.json", "audience": "tools"}]',
    "policy_url": "https://policy.example.com/v1",
    "policy_token_file": "/run/secrets/policy",
    "store": "postgresql://interlock@db.example.com/interlock",
    "store_admin": "postgresql://owner@db.example.com/interlock",
    "redis": "rediss://cache.example.com:6379",
    "redis_secret": "cache",
    "vault_url": "https://vault.example.com",
    "vault_mount": "kv",
    "vault_prefix": "interlock/",
    "vault_token_file": "/run/secrets/vault",
    "vault_namespace": "team",
    "vault_issued": '{"db": "database/creds/reader"}',
    "egress": '{"allowed_domains": ["api.example.com"]}',
    "egress_of": '{"agent": {"allowed_domains": ["api.example.com"]}}',
    "breakers": '[{"services": "bank", "failure_threshold": 2}]',
    "watched_files": "/srv/files,/srv/more",
    "watched_databases": "/srv/a.db",
    "watched_postgres": "postgresql://db.example.com/shop",
    "search_encoder": "table",
    "search_encoder_secret": "encoder",
    "search_vectors": "store",
    "selection_searches": "true",
    "surface_doors": "mcp,rest",
    "surface_pinned": '[{"tools": ["demo.post"]}]',
    "surface_excluded": '[{"tools": ["demo.*"]}]',
    "surface_models": '[{"capabilities": ["tool_calls"]}]',
    "selection_rules": '[{"tool": "demo.post", "words": ["book"]}]',
    "selection_model": "openai:small@https://models.example.com",
    "selection_model_secret": "models",
    "budgets": '[{"per": "tenant", "limit": 5.0}]',
    "rate_limits": '[{"per": "caller", "limit": 100, "window_s": 60}]',
    "prices": '{"cpu_s": 0.5}',
    "loops": '{"identical": 5}',
    "trace_ratio": "0.5",
    "otlp_endpoint": "http://localhost:4318",
    "keep_environment": "AWS_PROFILE",
}


def other_text(name: str) -> str:
    """A text for the variable of a setting that makes it another than its default."""
    if name in TEXTS:
        return TEXTS[name]
    default, annotation = Settings.model_fields[name].default, Settings.model_fields[name].annotation
    if isinstance(default, bool):
        return str(not default).lower()
    if get_origin(annotation) is Literal:
        return next(value for value in get_args(annotation) if value != default)
    assert isinstance(default, int | float), f"add a text for {name} to TEXTS"
    return str(default / 2 if isinstance(default, float) else default + 1 if name != "retention_years_writes" else 6)


@pytest.mark.part_of("OPS-06", rest=OPEN)
@pytest.mark.parametrize("name", Settings.model_fields)
def test_each_setting_is_overridden_by_its_variable(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"INTERLOCK_{name.upper()}", other_text(name))
    settings, sources = effective_settings(tmp_path / "settings.toml")
    value = getattr(settings, name)
    assert value != Settings.model_fields[name].default
    # What is one value in TOML is that value; the others are lists and tables, which have tests of their own.
    if isinstance(value, bool | int | float | str | Path):
        assert str(value).lower() == other_text(name).lower()
    assert sources == {name: variable(name)}


def test_a_variable_counts_more_than_the_file_and_an_argument_more_than_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("# ours\npayload_days = 30\nundo_days = 40\nmax_waiting = 7\n")
    monkeypatch.setenv("INTERLOCK_UNDO_DAYS", "50")
    settings, sources = effective_settings(file, max_waiting=8)
    assert (settings.payload_days, settings.undo_days, settings.max_waiting) == (30, 50, 8)
    assert sources == {
        "payload_days": "settings.toml, line 2",
        "undo_days": "INTERLOCK_UNDO_DAYS",
        "max_waiting": "what the program was given",
    }


@pytest.mark.part_of("OPS-06", rest=OPEN)
def test_defaults_are_the_numbers_of_the_requirements(tmp_path: Path) -> None:
    settings = load_settings(tmp_path / "settings.toml")
    assert settings.min_window_s == 3600
    assert (settings.retention_years, settings.retention_years_writes) == (1, 7)
    chain = [(step.group, step.after_seconds) for step in settings.approval.chain]
    assert chain == [("approvers", 0), ("managers", 3600), ("admins", 4 * 3600)]
    assert (settings.approval.timeout_seconds, settings.approval.escalation_fraction) == (24 * 3600, 0.5)
    breaker = CircuitBreakerConfig()  # pyright: ignore[reportCallIssue] - pydantic fills the defaults
    assert (breaker.failure_threshold, breaker.success_threshold, breaker.half_open_max_calls) == (5, 3, 10)
    assert (breaker.timeout_seconds, breaker.window_seconds) == (60, 60)
    retry = RetryPolicy()  # pyright: ignore[reportCallIssue] - pydantic fills the defaults
    assert (retry.max_attempts, retry.backoff_multiplier, retry.backoff_max_seconds) == (3, 2.0, 60)
    assert retry.retry_on_status_codes == (429, 500, 502, 503, 504)
    assert (settings.egress.allowed_ports, settings.egress.deny_all_egress) == ((80, 443), False)
    assert settings.deprecation_extend_days == 7
    assert (settings.backup_every_h, settings.backup_days, settings.checkpoint_days) == (24, 30, 90)
    assert settings.upstream_probe_s <= 300


@pytest.mark.part_of("OPS-06", rest=OPEN)
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("payload_days = 7\naudti = 'batched'\n", "line 2: there is no setting `audti`; did you mean `audit`?"),
        ("[approval]\ntimeout_second = 4\n", "line 2: there is no setting `approval.timeout_second`; did you mean"),
        ("payload_days = '7'\n", "line 1: `payload_days` cannot be used: input should be a valid integer"),
        ("housekeeping = 'yes'\n", "line 1: `housekeeping` cannot be used: input should be a valid boolean"),
        ("max_waiting = true\n", "line 1: `max_waiting` cannot be used: input should be a valid integer"),
        ("redact_names = 'iban'\n", "line 1: `redact_names` cannot be used: input should be a valid"),
        ("[[budgets]]\nper = 'tenant'\nlimit = 'five'\n", "line 3: `budgets.0.limit` cannot be used"),
        ("store = 'postgresql://me:hunter2@db/x'\n", "line 1: `store` holds a credential"),
        ("store_admin = 'postgresql://db/x?password=hunter2'\n", "line 1: `store_admin` holds a credential"),
        ("vault_url = 'https://vault/?token=hunter2'\n", "line 1: `vault_url` holds a credential"),
        ("otlp_endpoint = 'https://me:hunter2@collector'\n", "line 1: `otlp_endpoint` holds a credential"),
        (
            "[[channels]]\nname = 'a'\nurl = 'mailtos://me:hunter2@b.org'\n",
            "line 3: `channels.0.url` holds a credential",
        ),
        (
            "[[channels]]\nname = 'a'\nurl = 'slack://T1JJ3T3L2/A1BRTD4JD/hunter2'\n",
            "line 3: `channels.0.url` holds a credential",
        ),
        (
            "[[channels]]\nname = 'a'\nurl = 'https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/hunter2'\n",
            "line 3: `channels.0.url` holds a credential",
        ),
        ("[vault_issued]\ndb = 'ghp_hunter2hunter2'\n", "line 2: `vault_issued.db` holds a credential"),
    ],
)
async def test_a_setting_that_cannot_be_used_stops_the_start_with_its_place(
    text: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text(text)
    with pytest.raises(Failure) as refused:
        async with Interlock.open(tmp_path):
            pass
    assert refused.value.code == "E3108"
    assert f"settings.toml, {told}" in refused.value.message
    assert "hunter2" not in refused.value.message
    assert not (tmp_path / "interlock.db").exists()


@pytest.mark.parametrize(
    "text",
    [
        "store = 'postgresql://interlock@db.example.com/interlock?sslmode=require&passfile=/etc/pgpass'\n",
        "[[channels]]\nname = 'a'\nurl = 'mailtos://me:{secret}@b.org'\nsecret = 'mail'\n",
        "[[channels]]\nname = 'a'\nurl = 'https://hooks.slack.com/services/T1/A1/{secret}'\nsecret = 'chat'\n",
        "[[channels]]\nname = 'a'\nurl = 'mailto://relay.b.org?to=desk@b.org'\n",
        "selection_model = 'openai:m@https://models.example.com'\nselection_model_secret = 'models'\n",
        "[[redact_patterns]]\nname = 'key'\npattern = 'sk-live-[a-z0-9]{20}'\n",
        "vault_token_file = '/run/secrets/vault'\n",
    ],
)
def test_a_credential_that_is_named_is_not_taken_for_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(text)
    load_settings(tmp_path / "settings.toml")


def test_a_credential_in_a_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_STORE", "postgresql://me:hunter2@db/x")
    with pytest.raises(Failure, match="INTERLOCK_STORE: `store` holds a credential"):
        load_settings(tmp_path / "settings.toml")


CHANNELS = """
payload_days = 30
[[channels]]
name = "chat"
url = "slack://T1JJ3T3L2/A1BRTD4JD/{secret}"
secret = "chat"
[[channels]]
name = "desk"
webhook = "https://desk.example.com/hunter2"
secret = "desk-webhook"
[[trusted_issuers]]
iss = "https://id.example.com"
client_secret = "hunter2"
"""


@pytest.mark.part_of("OPS-06", rest=OPEN)
def test_the_settings_in_effect_are_shown_with_their_sources_and_without_secrets(fresh: Cli) -> None:
    fresh.home.mkdir()
    (fresh.home / "settings.toml").write_text(CHANNELS)
    cli = Cli(fresh.path, {"INTERLOCK_UNDO_DAYS": "50"})
    ended, printed = cli("config", "show"), cli("config", "show", "--json")
    assert (ended.code, printed.code) == (0, 0), ended.err
    assert "hunter2" not in ended.out + ended.err + printed.out
    rows: dict[str, Any] = {one["name"]: one for one in printed.json["settings"]}
    assert rows.keys() == Settings.model_fields.keys()
    told = {name: (rows[name]["value"], rows[name]["source"]) for name in ("payload_days", "undo_days", "audit")}
    assert told == {
        "payload_days": (30, "settings.toml, line 2"),
        "undo_days": (50, "INTERLOCK_UNDO_DAYS"),
        "audit": ("durable", "default"),
    }
    assert rows["channels"]["value"][1]["secret"] == "desk-webhook"  # its name
    changed = cli.ask("config", "show", "--changed")["settings"]
    assert {one["name"] for one in changed} == {"payload_days", "undo_days", "channels", "trusted_issuers"}
    assert [one["name"] for one in cli.ask("config", "show", "store")["settings"]] == ["store"]
    assert "did you mean `store`" in cli("config", "show", "stor").err
    assert not (fresh.home / "interlock.db").exists()


def test_the_settings_of_a_data_directory_that_states_none_are_shown(fresh: Cli) -> None:
    shown = fresh("config", "show")
    assert shown.code == 0, shown.err
    assert '"durable"' in shown.out
    rows: dict[str, Any] = {one["name"]: one["value"] for one in fresh.ask("config", "show")["settings"]}
    assert rows == {name: masked(value) for name, value in Settings.model_construct()}


def test_a_new_data_directory_shows_the_defaults_as_an_empty_settings_file_does(fresh: Cli) -> None:
    new, page = fresh("config", "show", "--json"), fresh("config", "show")
    assert (new.code, page.code) == (0, 0), page.err
    fresh.home.mkdir(exist_ok=True)
    (fresh.home / "settings.toml").touch()
    assert new.json == fresh.ask("config", "show")
    assert '"timeout_seconds"' in page.out


# Kubernetes sets the second one where a service is called interlock, and an operator of tools the third.
OTHERS = {"INTERLOCK_PAYLOAD_DAY": "3", "INTERLOCK_PORT": "tcp://10.0.0.1:8080", "INTERLOCK_DEMO_COLOUR": "red"}


@pytest.mark.part_of("OPS-06", rest=OPEN)
def test_a_variable_that_sets_nothing_stops_no_server_and_is_told_where_it_is_nearly_a_setting(fresh: Cli) -> None:
    with running(Cli(fresh.path, OTHERS), "--no-grpc", "--json") as server:
        ready = server.json["rest"].removesuffix("/v1") + "/ready"
        assert httpx.get(ready, timeout=PATIENCE_S).status_code == 200
        code, said = server.end()
    told = [line for line in said.splitlines() if "sets nothing" in line]
    assert (code, len(told)) == (0, 1), said
    assert "the variable INTERLOCK_PAYLOAD_DAY sets nothing; did you mean INTERLOCK_PAYLOAD_DAYS?" in told[0]


def test_every_file_is_checked_at_once_and_nothing_is_started(fresh: Cli) -> None:
    fresh.home.mkdir()
    assert fresh("config", "check").code == 0
    (fresh.home / "settings.toml").write_text("audti = 'batched'\n[[trusted_issuers]]\niss = 'x'\n")
    (fresh.home / "principals.toml").write_text("[[principal]]\nid = 'a'\ntrust = 101\nkind = 'robot'\n")
    (fresh.home / "policy.cedar").write_text("permit (principal, action, resource)")
    (fresh.path / "bad.yaml").write_text("tools:\n  get:\n    mutation_clas: read_only\n")
    cli = Cli(fresh.path, {"INTERLOCK_PAYLOAD_DAY": "3"})
    ended = cli("config", "check", "--overlay", "bad.yaml", "--json")
    assert ended.code == 1
    files = {Path(one["file"]).name: one for one in ended.json["files"]}
    assert files.keys() == {"settings.toml", "principals.toml", "policy.cedar", "bad.yaml"}
    assert files["settings.toml"]["faults"] == ["line 1: there is no setting `audti`; did you mean `audit`?"]
    assert "did you mean INTERLOCK_PAYLOAD_DAYS?" in files["settings.toml"]["warnings"][0]
    places = [fault.partition(":")[0] for fault in files["principals.toml"]["faults"]]
    assert sorted(places) == ["`principal.0.kind`", "`principal.0.trust`"]
    assert files["policy.cedar"]["faults"][0].startswith("line 1: ")
    assert "mutation_clas" in json.dumps(files["bad.yaml"]["faults"])
    shown = cli("config", "check")
    assert "✗   settings.toml   line 1: there is no setting `audti`" in shown.out
    (fresh.home / "settings.toml").write_text("[[trusted_issuers]]\niss = 'x'\n")
    (told,) = cli.ask("config", "check")["files"][0]["faults"]
    assert told.startswith("`trusted_issuers.0`: ")
    assert not (fresh.home / "interlock.db").exists()


def test_a_policy_is_checked_against_the_tools_of_the_store(cli: Cli) -> None:
    (cli.home / "policy.cedar").write_text(
        '@id("large")\npermit (principal, action == Action::"demo.post", resource)\n'
        "when { context.arguments.sents > 100 };\n"
    )
    ended = cli("config", "check")
    assert ended.code == 1
    assert "`arguments.sents`" in ended.out
    (cli.home / "policy.cedar").unlink()
    assert "policy.cedar is missing" in cli("config", "check").out


def test_a_directory_that_is_alone_agrees_with_itself(cli: Cli) -> None:
    ended = cli("config", "diff", "--json")
    assert (ended.code, ended.json["agree"], ended.json["differences"]) == (0, True, {})
    (node,) = ended.json["nodes"]
    assert (node["here"], node["directory"], node["processes"]) == (True, str(cli.home), 0)
    assert len(node["versions"]) == len(node["schemas"]) == 1
    assert node["files"]["policy.cedar"]
    assert "no other machine runs on this store" in cli("config", "diff").out


def test_a_data_directory_without_settings_has_the_defaults_of_the_models(tmp_path: Path) -> None:
    settings, model = defaults_if_unstated(tmp_path / "settings.toml"), Settings.model_construct()
    assert settings is not None
    for name in (*Settings.model_fields, "backup_every_ms"):
        assert_same(getattr(settings, name), getattr(model, name))
    assert isinstance(settings, Defaults)
    shown = {name: masked(getattr(model, name)) for name in Settings.model_fields}
    assert json.dumps(settings.plain()) == json.dumps(shown)
    assert settings.model_copy(update={"payload_days": 3}).payload_days == 3
    with pytest.raises(AttributeError):
        settings.payload_days = 3  # pyright: ignore[reportAttributeAccessIssue] - frozen
    with pytest.raises(AttributeError):
        getattr(settings, "nothing_such")  # noqa: B009 - the type checker knows that there is none


def assert_same(value: Any, of_model: Any) -> None:
    """Settings that have parts are compared part by part."""
    if not isinstance(of_model, BaseModel):
        assert (type(value), value) == (type(of_model), of_model)
        return
    for name in type(of_model).model_fields:
        assert_same(getattr(value, name), getattr(of_model, name))


def test_stated_settings_are_no_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.toml"
    monkeypatch.setenv("INTERLOCK_PRICES", '{"cpu_s": 1.0}')
    assert defaults_if_unstated(path) is None
    monkeypatch.delenv("INTERLOCK_PRICES")
    assert defaults_if_unstated(path) is not None
    path.write_text("")
    assert defaults_if_unstated(path) is None
