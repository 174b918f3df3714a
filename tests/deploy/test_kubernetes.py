"""The manifests in deploy/kubernetes: valid for the newest Kubernetes, and what they say of the program is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
import pytest
import yaml

from interlock.cli import root as cli
from interlock.settings import Settings
from tests import warm
from tests.needs import missing
from tests.support.cli import Cli
from tests.support.postgres import Server

DEPLOY = Path(__file__).parents[2] / "deploy"
IMAGE = (DEPLOY / "container" / "Containerfile").read_text()
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KINDS = {"StatefulSet", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy", "Job"}
Document = dict[str, Any]


def documents() -> Iterator[Document]:
    for path in FILES:
        yield from yaml.safe_load_all(path.read_text())


def one(kind: str, name: str = "") -> Document:
    """The document of a kind; of several, the one with a name."""
    (found,) = [
        document
        for document in documents()
        if document["kind"] == kind and document["metadata"]["name"] == (name or document["metadata"]["name"])
    ]
    return found


def pods() -> dict[str, Document]:
    return {kind: one(kind)["spec"]["template"]["spec"] for kind in ("StatefulSet", "Job")}


def variables(container: Document) -> dict[str, str]:
    """The environment of a container."""
    named = {each["name"]: each["value"] for each in container.get("env", ())}
    return {**(one("ConfigMap")["data"] if "envFrom" in container else {}), **named}


def test_manifests_are_valid_for_the_newest_kubernetes() -> None:
    try:
        import kubernetes_validate  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        missing("kubernetes-validate is not installed: requirements/dev.txt")
    assert {document["kind"] for document in documents()} >= KINDS
    for document in documents():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
        assert document["metadata"]["namespace"] == "interlock"


def test_pods_are_restricted_and_run_as_the_user_of_the_image() -> None:
    assert re.findall(r"^USER (\d+)$", IMAGE, re.MULTILINE) == ["1000"]
    for pod in pods().values():
        of_pod = pod["securityContext"]
        assert (of_pod["runAsNonRoot"], of_pod["runAsUser"], of_pod["fsGroup"]) == (True, 1000, 1000)
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        volumes = {volume["name"] for volume in (*pod["volumes"], {"name": "data"})}
        for container in (*pod["initContainers"], *pod["containers"]):
            confined = container["securityContext"]
            assert confined["allowPrivilegeEscalation"] is False
            assert confined["readOnlyRootFilesystem"] is True
            assert confined["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            # Whatever is written lies on a volume.
            home = Path(variables(container)["INTERLOCK_HOME"])
            assert any(home.is_relative_to(mount["mountPath"]) for mount in container["volumeMounts"])
            assert container["resources"]["limits"]["memory"]


def test_passwords_and_keys_are_references_to_secrets() -> None:
    for kind, pod in pods().items():
        (seed,) = [volume for volume in pod["volumes"] if volume["name"] == "seed"]
        secrets = [source["secret"]["name"] for source in seed["projected"]["sources"]]
        assert secrets == ["interlock-home", "interlock-database" + ("-owner" if kind == "Job" else "")]
        for container in pod["containers"]:
            for name, value in variables(container).items():
                assert "password" not in (name + value).lower()
    assert "Secret" not in [document["kind"] for document in documents()]


def test_labels_ports_and_names_agree() -> None:
    servers = one("StatefulSet")
    labels = servers["spec"]["template"]["metadata"]["labels"]
    (container,) = pods()["StatefulSet"]["containers"]
    (port,) = container["ports"]
    services = [document for document in documents() if document["kind"] == "Service"]
    assert [service["spec"]["selector"] for service in services] == [labels, labels]
    for service in services:
        assert [each["targetPort"] for each in service["spec"]["ports"]] == [port["name"]]
    assert servers["spec"]["serviceName"] in [service["metadata"]["name"] for service in services]
    for kind, name in (
        ("PodDisruptionBudget", ""), ("NetworkPolicy", "interlock"), ("NetworkPolicy", "interlock-redis")
    ):  # fmt: skip
        spec = one(kind, name)["spec"]
        assert spec.get("selector", spec.get("podSelector")) == {"matchLabels": labels}
    assert port["containerPort"] == 8080
    assert f"EXPOSE {port['containerPort']}\n" in IMAGE


def test_servers_reach_the_database_and_redis_where_it_is_applied() -> None:
    def ports(name: str) -> set[int]:
        rules = one("NetworkPolicy", name)["spec"]["egress"]
        return {each["port"] for rule in rules if "to" not in rule for each in rule["ports"]}

    assert ports("interlock") == {53, 5432}
    compose: Document = yaml.safe_load((DEPLOY / "container" / "compose.postgres.yaml").read_text())
    variables: list[dict[str, str]] = [service.get("environment", {}) for service in compose["services"].values()]
    (url,) = {found["INTERLOCK_REDIS"] for found in variables if "INTERLOCK_REDIS" in found}
    assert ports("interlock-redis") == {urlsplit(url).port}


@pytest.mark.part_of("OPS-11", rest="manifests are validated and not applied to a cluster")
def test_servers_are_replaced_one_by_one_have_time_to_drain_and_scale_to_twenty() -> None:
    spec = one("StatefulSet")["spec"]
    context = _context(pods()["StatefulSet"]["containers"][0]["args"])
    probe = pods()["StatefulSet"]["containers"][0]["readinessProbe"]
    noticed = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert context.params["shutdown_delay"] > noticed
    ends = context.params["shutdown_delay"] + context.params["drain_timeout"]
    assert pods()["StatefulSet"]["terminationGracePeriodSeconds"] >= ends + 15
    assert spec["updateStrategy"]["type"] == "RollingUpdate"
    assert one("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    scaling = one("HorizontalPodAutoscaler")["spec"]
    assert (scaling["minReplicas"], scaling["maxReplicas"]) == (3, 20)
    assert scaling["scaleTargetRef"]["name"] == one("StatefulSet")["metadata"]["name"]
    assert "replicas" not in spec


def _context(words: list[str]) -> click.Context:
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    return command.make_context(words[0], words[1:])


def test_what_the_manifests_start_serves_what_they_probe(tmp_path: Path, postgres_server: Server) -> None:
    """The init container, the migration and the server of the manifests, one after the other, on another directory."""
    store = postgres_server.new_schema()
    seed = Cli(tmp_path / "seed", {"INTERLOCK_STORE": store})
    seed.path.mkdir()
    assert seed("tools", "list").code == 0
    assert seed("token", "issue", "--agent", "a", "--tool", "*").code == 0
    assert seed("config", "push").code == 0
    (seed.home / "settings.toml").write_text("shared_config = true\n")
    (tmp_path / "mounted").mkdir()
    with tarfile.open(tmp_path / "mounted" / "home.tar", "w") as tar:
        for name in ("keys", "settings.toml"):
            tar.add(seed.home / name, name)
    (tmp_path / "mounted" / "pgpass").write_text("*:*:*:*:secret\n")
    for kind, pod in pods().items():
        place = tmp_path / kind
        place.mkdir()

        def here(text: str, place: Path = place) -> str:
            return text.replace("/data", str(place)).replace("/seed", str(tmp_path / "mounted"))

        (prepare,), (container,) = pod["initContainers"], pod["containers"]
        base = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
        given = {name: here(value) for name, value in variables(container).items()}
        for name in given:
            setting = name.removeprefix("INTERLOCK_").lower()
            assert name in ("INTERLOCK_HOME", "PGPASSFILE") or setting in Settings.model_fields
        stores = {name: store for name in given if name.startswith("INTERLOCK_STORE")}
        environment = {**base, **given, **stores}
        for _ in range(2):  # at the first start, and at any other
            subprocess.run([here(word) for word in prepare["command"]], env=environment, check=True)
        assert Path(given["PGPASSFILE"]).stat().st_mode & 0o777 == 0o600
        if kind == "Job":
            code, out, err = warm.run(container["args"], environment, place)
            assert code == 0, out + err
        else:
            _serves(container, environment, place)


def _serves(container: Document, environment: dict[str, str], place: Path) -> None:
    words = [re.sub("--port=.*", "--port=0", re.sub("--host=.*", "--host=0.0.0.0", word)) for word in container["args"]]
    with warm.start((*words, "--json"), environment, place) as process:
        said = ""
        while not said.endswith("}\n"):
            line = process.stdout.readline().decode()
            assert line, process.communicate()[1].decode()
            said += line
        port = re.findall(r":(\d+)", json.loads(said)["rest"])[0]
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[name]["httpGet"]
            assert asked["port"] == container["ports"][0]["name"]
            headers = {header["name"]: header["value"] for header in asked["httpHeaders"]}
            answer = httpx.get(f"http://127.0.0.1:{port}{asked['path']}", headers=headers, timeout=60)
            assert answer.status_code == 200, (name, answer.text)
        # By the address of a pod, as a probe without the header would ask, it is refused.
        refused = httpx.get(f"http://127.0.0.1:{port}/health", headers={"Host": "10.1.2.3:8080"}, timeout=60)
        assert refused.status_code != 200
