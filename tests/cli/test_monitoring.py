"""The dashboard and the alert rules under deploy/monitoring, with a real Prometheus that reads a real server."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from interlock.telemetry.alerts import SIGNALS
from interlock.telemetry.metrics import METRICS
from tests.needs import need
from tests.support.cli import Cli, bearer, running
from tests.support.ports import unused_port

Json = dict[str, Any]
FILES = Path(__file__).parents[2] / "deploy" / "monitoring"
DASHBOARD: Json = json.loads((FILES / "grafana.json").read_text())
EXPRESSIONS = {
    (panel["title"], target["refId"]): target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
}
# Panels of what no call of the test brings about.
MAY_BE_EMPTY = {
    "How long people take to decide, p90",
    "Cost per hour",
    "Timeouts and retries",
    "Signals",
}
WAIT_S = 60


def _promtool(*words: str) -> None:
    done = subprocess.run([need("promtool", "prometheus"), *words], cwd=FILES, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_valid_and_raise_what_they_should() -> None:
    _promtool("check", "rules", "rules.yml")
    _promtool("test", "rules", "rules_test.yml")


def test_the_configuration_is_valid() -> None:
    _promtool("check", "config", "prometheus.yml")


def test_every_critical_signal_raises_an_alert() -> None:
    named = re.findall(r'signal=~"([^"]+)"', (FILES / "rules.yml").read_text())
    critical = sorted(name for name, severity in SIGNALS.items() if severity == "critical")
    assert [sorted(one.split("|")) for one in named] == [critical, critical]


def test_only_metrics_and_labels_that_exist_are_named() -> None:
    known = {metric.name.replace(".", "_"): {*metric.labels, "instance", "job"} for metric in METRICS}
    texts = [(FILES / "rules.yml").read_text(), *EXPRESSIONS.values()]
    seen: set[str] = set()
    for text in texts:
        for name, labels in re.findall(r"\b((?:tool|interlock)_[a-z_]+)(?:\{([^}]*)\})?", text):
            metric = re.sub("_(bucket|sum|count)$", "", name) if name not in known else name
            seen.add(metric)
            assert set(re.findall(r"([A-Za-z]+)=", labels)) <= known[metric], name
    assert seen == set(known), "every metric is shown or watched"


@contextmanager
def prometheus(target: str, place: Path) -> Generator[httpx.Client]:
    """A Prometheus that reads a server several times a second."""
    program = need("prometheus", "prometheus")
    config = (FILES / "prometheus.yml").read_text().replace("127.0.0.1:8080", target).replace("15s", "200ms")
    (place / "prometheus.yml").write_text(config.replace("rules.yml", str(FILES / "rules.yml")))
    address = f"127.0.0.1:{unused_port()}"
    words = [
        program, f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data",
        f"--web.listen-address={address}", "--log.level=error",
    ]  # fmt: skip
    process = subprocess.Popen(words)
    try:
        with httpx.Client(base_url=f"http://{address}/api/v1", timeout=WAIT_S) as client:
            yield client
    finally:
        process.terminate()
        process.wait(WAIT_S)


def _ask(client: httpx.Client, query: str) -> list[Any]:
    """What a query finds now; nothing before Prometheus listens."""
    try:
        answer = client.get("/query", params={"query": query})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    assert answer.status_code == 200, f"{query}: {answer.text}"
    return answer.json()["data"]["result"]


FAILING = """
from typing import Annotated
from interlock import Field, tool

@tool(version="1.0.0", mutation_class="read_only", namespace="ops")
def fail(count: Annotated[int, Field(description="how often", examples=[0])]) -> int:
    "Fail, unless asked for nothing."
    return 1 // (count == 0)
"""


def test_every_panel_shows_what_a_server_does(cli: Cli, tmp_path: Path) -> None:
    (cli.path / "failing.py").write_text(FAILING)
    assert cli("tools", "add", "failing.py").code == 0
    with running(cli, "--no-grpc", "--token", "--json") as server:
        told = server.json
        target = told["rest"].removeprefix("http://").removesuffix("/v1")
        with prometheus(target, tmp_path) as asked, httpx.Client(headers=bearer(told["token"]), timeout=WAIT_S) as http:

            def call(tool: str, key: str | None = None, **parameters: Any) -> None:
                body: Json = {"tool_id": tool, "parameters": parameters}
                http.post(f"{told['rest']}/tools/invoke", json=body if key is None else body | {"idempotency_key": key})

            call("demo.mail_statement", "m", account="cash", to="ada@example.com")
            missing = dict(EXPRESSIONS)
            until = time.monotonic() + WAIT_S
            while any(title not in MAY_BE_EMPTY for title, _ in missing):
                assert time.monotonic() < until, f"without data: {sorted(missing)}"
                call("demo.balance", account="cash")
                call("demo.balance", account=7)
                call("ops.fail", count=1)
                call("demo.post", "p", account="cash", cents=1)
                for panel, expression in list(missing.items()):
                    query = expression.replace("$__rate_interval", "5s")
                    query = re.sub(r"\$(tool|instance)", ".*", query)
                    if _ask(asked, query):
                        del missing[panel]
            assert asked.get("/rules").json()["data"]["groups"][0]["name"] == "interlock"
        assert server.end()[0] == 0
