"""The container image and the units: built on a Debian base and run by podman, and by systemd in a container of podman.

No registry of images can be reached from a test, so the base is made by debootstrap: Debian 12 with its Python 3.11.
The engine is podman with runc. Limits are stated, because a test machine may not raise its own.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import secrets
import subprocess
import tarfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.needs import need
from tests.support import image_layers
from tests.thorough import THOROUGH

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "container"
BASE, IMAGE = "localhost/interlock-test-base", "localhost/interlock-test"
PACKAGES = "python3,python3-venv,python3-dev,ca-certificates"
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096")
# The image with systemd and the units, installed as docs/how-to/team.md says.
MACHINE = f"""FROM {IMAGE}
USER 0
RUN apt-get update && apt-get install -y --no-install-recommends systemd dbus
RUN ln -s /opt/interlock /usr/local/lib/interlock && install -d -m 700 -o interlock -g interlock /srv/backups
COPY systemd /etc/systemd/system
RUN systemctl enable interlock.service interlock-drill.timer
ENTRYPOINT []
CMD ["/lib/systemd/systemd"]
"""
# What the compose file and the manifests confine a server with.
CONFINED = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--tmpfs=/tmp")
PATIENCE_S = 120.0


def run(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in words], check=False, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def podman(*words: str | Path) -> str:
    return run("podman", "--runtime", "runc", *words).stdout.strip()


@contextmanager
def built(base: Path) -> Generator[Path]:
    """Build the image. Yields the root of its files, mounted."""
    need("podman", "podman")
    need("runc", "runc")
    run(need("debootstrap", "debootstrap"), "--variant=minbase", f"--include={PACKAGES}", "bookworm", base)
    run("umount", base / "proc", check=False)  # debootstrap may leave it mounted
    run("tar", "-C", base, "-cf", base.with_suffix(".tar"), ".")
    podman("import", base.with_suffix(".tar"), BASE)
    # What the machine tells pip of its indexes, and whom it trusts, holds for the build as well.
    pip = [f"--volume={path}:{path}:ro" for path in ("/etc/pip.conf", "/etc/ssl/certs") if Path(path).exists()]
    try:
        podman(
            *("build", "--format=docker", "--network=host", *LIMITS, *pip, f"--build-arg=BASE={BASE}"),
            *("-f", FOLDER / "Containerfile", "-t", IMAGE, ROOT),
        )
        yield Path(podman("image", "mount", IMAGE))
    finally:
        run("podman", "image", "unmount", IMAGE, check=False)
        run("podman", "rmi", "--force", f"{IMAGE}-machine", IMAGE, BASE, check=False)
        run("podman", "image", "prune", "--force", check=False)


@contextmanager
def container(*words: str) -> Generator[str]:
    """A container of the image that runs in the background, confined."""
    name = podman("run", "--detach", *LIMITS, *CONFINED, *words)
    try:
        yield name
    finally:
        podman("rm", "--force", "--volumes", name)


def looks_right() -> None:
    (inspected,) = json.loads(podman("image", "inspect", IMAGE))
    config: dict[str, Any] = inspected["Config"]
    assert config["User"] == "1000"
    assert config["ExposedPorts"] == {"8080/tcp": {}}
    second = 1_000_000_000
    check = inspected["Healthcheck"]
    assert check["Test"][0] == "CMD"
    assert "http://127.0.0.1:8080/health" in check["Test"][-1]
    assert (check["Interval"], check["Timeout"]) == (30 * second, 3 * second)
    assert (check["StartPeriod"], check["Retries"]) == (5 * second, 3)
    # What it adds to its base: Interlock with what it needs, and bubblewrap.
    (base,) = json.loads(podman("image", "inspect", BASE))
    assert inspected["Size"] - base["Size"] < 400_000_000


def has_no_secrets_compilers_or_caches(root: Path) -> None:
    assert (root / "opt" / "interlock" / "bin" / "interlock").exists()
    for unwanted in ("usr/bin/gcc", "usr/bin/cc", "opt/interlock/bin/pip", "root/.cache", "build"):
        assert not (root / unwanted).exists()
    assert not list((root / "var" / "lib" / "apt" / "lists").glob("*_Packages"))
    assert list((root / "opt" / "interlock").rglob("_walk*.so"))
    for volume in ("data", "backups"):  # a new volume belongs to whom the directory in the image belongs to
        assert not list((root / volume).iterdir())
        assert ((root / volume).stat().st_uid, (root / volume).stat().st_mode & 0o777) == (1000, 0o700)
    keys = [path for kind in ("*.key", "*.ed25519", "*.pem") for path in (root / "opt").rglob(kind)]
    assert {path.name for path in keys} <= {"cacert.pem", "roots.pem"}  # public, of certificate authorities


def every_file_of_its_layers_came_with_something_it_needs(root: Path, archive: Path) -> None:
    """Also files that a later layer removes: they are still in the image."""
    podman("save", "--format=docker-archive", "--output", archive, IMAGE)
    (inspected,) = json.loads(podman("image", "inspect", IMAGE))
    (base,) = json.loads(podman("image", "inspect", BASE))
    own = image_layers.layers(archive)[len(base["RootFS"]["Layers"]) :]
    assert len(own) == 3  # packages, the account, the program
    environment = root / "opt" / "interlock"
    distributions = image_layers.distributions(environment)
    assert set(distributions) == image_layers.needed(environment, "interlock")
    known = {path: digest for files in distributions.values() for path, digest in files.items()}
    packages = image_layers.of_packages(root)
    installed = set[str]()
    for files in own:
        assert image_layers.without_origin(files, packages, "opt/interlock", known) == []
        for one in files:
            assert not image_layers.PRIVATE_KEY.search(one.content), one.path
            # The user of the server can change nothing of it, and become nobody else.
            assert one.owner == 0, one.path
            assert one.link or not one.mode & 0o6002, one.path
            if one.path.startswith("var/lib/dpkg/info/") and one.path.endswith(".list"):
                installed.add(Path(one.path).stem.partition(":")[0])
    assert installed == {"bubblewrap"}
    names = {line.partition("=")[0] for line in inspected["Config"]["Env"]}
    assert names - {line.partition("=")[0] for line in base["Config"].get("Env") or ()} <= {
        "PATH", "INTERLOCK_HOME", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED",
    }  # fmt: skip


def wait_until_ready(base: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            answer = httpx.get(f"{base}/ready", timeout=60)
        except httpx.TransportError:
            assert time.monotonic() < until
            time.sleep(0.1)
            continue
        assert answer.json()["status"] == "healthy"
        return


def serves_confined_and_goes_on_in_the_next_container() -> None:
    """The smoke flow over the published port, in two containers with one volume after each other."""
    volume = f"interlock-test-{secrets.token_hex(4)}"
    sent: dict[str, Any] = {
        "tool_id": "demo.post", "parameters": {"account": "cash", "cents": 250}, "idempotency_key": "order-17",
    }  # fmt: skip
    token, answers = "", list[Any]()
    try:
        for _ in range(2):
            with container(f"--volume={volume}:/data", "--publish=127.0.0.1::8080", IMAGE) as name:
                base = f"http://{podman('port', name, '8080/tcp')}"
                wait_until_ready(base)
                podman("healthcheck", "run", name)
                if not token:
                    podman("exec", name, "interlock", "tools", "add", "interlock.demo_tools")
                    words = ("token", "issue", "--agent", "tester", "--tool", "demo.*")
                    token = podman("exec", name, "interlock", *words)
                bearer = {"authorization": f"Bearer {token}"}
                answer = httpx.post(f"{base}/v1/tools/invoke", json=sent, headers=bearer, timeout=60)
                assert answer.status_code == 200, answer.text
                answers.append(answer.json())
                assert "intact" in podman("exec", name, "interlock", "audit", "verify")
                status = podman("exec", name, "cat", "/proc/1/status")
                facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
                assert facts["Uid"].split() == ["1000"] * 4
                assert [int(facts[one], 16) for one in ("CapPrm", "CapEff", "CapBnd")] == [0, 0, 0]
                refused = run("podman", "--runtime", "runc", "exec", name, "touch", "/written", check=False)
                assert "Read-only file system" in refused.stderr
                podman("stop", "--time=60", name)
                assert podman("inspect", "--format={{.State.ExitCode}}", name) == "0"
        assert answers[0]["result"] == answers[1]["result"]
        assert [answer["replayed"] for answer in answers] == [False, True]
    finally:
        run("podman", "volume", "rm", "--force", volume, check=False)


def its_health_check_fails_without_a_server() -> None:
    with container("--entrypoint=sleep", IMAGE, "600") as name:
        checked = run("podman", "--runtime", "runc", "healthcheck", "run", name, check=False)
        assert checked.returncode == 1


def runs_as_a_service_of_systemd(place: Path) -> None:
    (place / "Containerfile").write_text(MACHINE)
    image = f"{IMAGE}-machine"
    words = ("build", "--format=docker", "--network=host", *LIMITS, "-f", place / "Containerfile", "-t", image)
    podman(*words, FOLDER.parent)
    name = podman("run", "--detach", "--privileged", "--systemd=always", *LIMITS, image)

    def inside(*words: str) -> str:
        return podman("exec", name, *words)

    def interlock(*words: str) -> str:
        return inside(
            *("runuser", "-u", "interlock", "--", "/usr/local/lib/interlock/bin/interlock", "--home"),
            *("/var/lib/interlock", *words),
        )

    def until(reached: str) -> None:
        """Wait until a command inside succeeds."""
        patience = time.monotonic() + PATIENCE_S
        while run("podman", "--runtime", "runc", "exec", name, "sh", "-c", reached, check=False).returncode:
            assert time.monotonic() < patience, inside("journalctl", "--no-pager", "-u", "interlock*")
            time.sleep(0.2)

    ready = "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8480/ready\")'"
    try:
        until(ready)
        assert "admitted" in interlock("tools", "add", "interlock.demo_tools")
        made = json.loads(interlock("call", "demo.post", '{"account": "cash", "cents": 5}', "--key", "a", "--json"))
        assert made["status"] == "succeeded"
        inside(
            *("runuser", "-u", "interlock", "--", "sh", "-c"),
            "echo 'backup_to = \"/srv/backups\"' > /var/lib/interlock/settings.toml",
        )
        inside("systemctl", "restart", "interlock")
        until("test -e /srv/backups/*/interlock.db")
        inside("systemctl", "start", "interlock-drill")  # it waits for the end, and fails if the drill does
        assert "restored and compared" in inside("journalctl", "--no-pager", "-u", "interlock-drill")
        until(ready)
        inside("systemctl", "stop", "interlock")
        shown = inside("systemctl", "show", "interlock", "-p", "Result", "-p", "ExecMainStatus").splitlines()
        assert sorted(shown) == ["ExecMainStatus=0", "Result=success"]
    finally:
        podman("rm", "--force", "--volumes", name)


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not THOROUGH, reason="takes minutes: ./dev test --thorough builds the image")
@pytest.mark.proves("OPS-09")
def test_the_image_runs_as_user_1000_read_only_and_holds_what_it_needs_alone(tmp_path: Path) -> None:
    with built(tmp_path / "base") as root:
        looks_right()
        has_no_secrets_compilers_or_caches(root)
        every_file_of_its_layers_came_with_something_it_needs(root, tmp_path / "image.tar")
        serves_confined_and_goes_on_in_the_next_container()
        its_health_check_fails_without_a_server()
        runs_as_a_service_of_systemd(tmp_path)


def test_a_file_without_an_origin_is_found_in_the_layer_that_has_it(tmp_path: Path) -> None:
    """A later layer removes a file that an earlier one should not have."""
    program = b"print()"
    digest = base64.urlsafe_b64encode(hashlib.sha256(program).digest()).decode().rstrip("=")
    contents = (
        {"opt/interlock/lib/one.py": program, "usr/bin/bwrap": b"", "etc/pip.conf": b""},
        {"root/.netrc": b"password", "opt/interlock/lib/one.py": b"other", "etc/pip.conf": b"[global]"},
        {"root/.wh..netrc": b"", "bin/bwrap": b"", "opt/interlock/pyvenv.cfg": b"home"},
    )
    members = {f"{number}.tar": _packed(content) for number, content in enumerate(contents)}
    manifest = json.dumps([{"Layers": [*members]}]).encode()
    (tmp_path / "image.tar").write_bytes(_packed({**members, "manifest.json": manifest}))
    found = [
        image_layers.without_origin(files, frozenset({"usr/bin/bwrap"}), "opt/interlock", {"lib/one.py": digest})
        for files in image_layers.layers(tmp_path / "image.tar")
    ]
    assert found == [[], ["root/.netrc", "opt/interlock/lib/one.py", "etc/pip.conf"], []]


def _packed(contents: Mapping[str, bytes]) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return whole.getvalue()
