"""The container image: built from the Containerfile on a Debian base, looked at, and run on a read-only root.

No registry of images can be reached from a test, so the base is made by debootstrap: Debian 12 with its Python 3.11.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.needs import need
from tests.thorough import THOROUGH

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "container"
BASE, IMAGE = "localhost/interlock-test-base", "localhost/interlock-test"
PACKAGES = "python3,python3-venv,python3-dev,ca-certificates"


def run(*words: str | Path) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout


@contextmanager
def built(base: Path) -> Generator[tuple[str, Path]]:
    """The image, and its root, mounted."""
    need("buildah", "buildah")
    run(need("debootstrap", "debootstrap"), "--variant=minbase", f"--include={PACKAGES}", "bookworm", base)
    subprocess.run(["umount", base / "proc"], check=False, capture_output=True)  # debootstrap may leave it mounted
    container = run("buildah", "from", "scratch").strip()
    run("buildah", "add", "-q", container, base, "/")
    run("buildah", "commit", "-q", "--rm", container, BASE)
    # What the machine tells pip of its indexes, and whom it trusts, holds for the build as well.
    pip = [f"--volume={path}:{path}:ro" for path in ("/etc/pip.conf", "/etc/ssl/certs") if Path(path).exists()]
    run(
        *("buildah", "bud", "--format=docker", "--isolation=chroot", "--network=host", *pip),
        *(f"--ignorefile={ROOT / '.containerignore'}", f"--build-arg=BASE={BASE}"),
        *("-f", FOLDER / "Containerfile", "-t", IMAGE, ROOT),
    )
    container = run("buildah", "from", IMAGE).strip()
    try:
        yield IMAGE, Path(run("buildah", "mount", container).strip())
    finally:
        run("buildah", "rm", container)
        run("buildah", "rmi", "-f", IMAGE, BASE)


def looks_right(image: str) -> None:
    inspected = json.loads(run("buildah", "inspect", "--type=image", image))
    config: dict[str, Any] = json.loads(inspected["Config"])["config"]
    assert config["User"] == "1000"
    assert config["ExposedPorts"] == {"8080/tcp": {}}
    second = 1_000_000_000
    check = config["Healthcheck"]
    assert check["Test"][0] == "CMD"
    assert "http://127.0.0.1:8080/health" in check["Test"][-1]
    assert (check["Interval"], check["Timeout"]) == (30 * second, 3 * second)
    assert (check["StartPeriod"], check["Retries"]) == (5 * second, 3)


def has_no_secrets_compilers_or_caches(root: Path) -> None:
    assert (root / "opt" / "interlock" / "bin" / "interlock").exists()
    for unwanted in ("usr/bin/gcc", "usr/bin/cc", "opt/interlock/bin/pip", "root/.cache", "build"):
        assert not (root / unwanted).exists()
    assert not list((root / "var" / "lib" / "apt" / "lists").glob("*_Packages"))
    assert list((root / "opt" / "interlock").rglob("_walk*.so"))
    assert not list((root / "data").iterdir())
    keys = [path for kind in ("*.key", "*.ed25519", "*.pem") for path in (root / "opt").rglob(kind)]
    assert {path.name for path in keys} <= {"cacert.pem", "roots.pem"}  # public, of certificate authorities


def serves_on_a_read_only_root_without_capabilities(root: Path, data: Path) -> None:
    data.mkdir(mode=0o700)
    command = [
        *(str(need("bwrap", "bubblewrap")), "--ro-bind", str(root), "/", "--bind", str(data), "/data"),
        *("--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev", "--cap-drop", "ALL", "--clearenv"),
        *("--unshare-user", "--uid", "1000", "--gid", "1000", "--chdir", "/data"),
        *("--setenv", "PATH", "/opt/interlock/bin:/usr/bin:/bin", "--setenv", "INTERLOCK_HOME", "/data"),
        *("interlock", "serve", "--host", "0.0.0.0", "--port", "0", "--no-grpc", "--no-token", "--json"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            served = json.loads(server.stdout.readline())
            with urllib.request.urlopen(f"{served['base_url']}/ready") as answer:
                assert json.load(answer)["status"] == "healthy"
        finally:
            for inner in run("pgrep", "-P", str(server.pid)).split():
                os.kill(int(inner), signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not THOROUGH, reason="takes minutes: ./dev test --thorough builds the image")
@pytest.mark.part_of("OPS-09", rest="a run by a container engine, of which none works in a test machine")
def test_the_image_runs_as_user_1000_read_only_and_holds_what_it_needs_alone(tmp_path: Path) -> None:
    with built(tmp_path / "base") as (image, root):
        looks_right(image)
        has_no_secrets_compilers_or_caches(root)
        serves_on_a_read_only_root_without_capabilities(root, tmp_path / "data")
