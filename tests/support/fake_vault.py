"""A FAKE of Vault's HTTP API on 127.0.0.1: key-value version 2, issued credentials, leases, and ways to fail.

Beside it stands `/service`, what an issued credential is good for: it lets in whoever holds a lease that is in force.
"""

from __future__ import annotations

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

TOKEN = "hvs.fake-token"
Json = dict[str, Any]


class FakeVault:
    """What the fake holds, and how it shall behave."""

    def __init__(self) -> None:
        self.secrets: dict[str, Json] = {}
        self.leases: dict[str, str] = {}
        self.lease_duration = 60
        # How long each lease lasts by now, how long one can last at most, and whether one can be renewed.
        self.terms: dict[str, float] = {}
        self.longest_s: float = 3600
        self.renewable = True
        self.renews = True
        self.fails: tuple[int, str] | None = None
        self.redirect_to: str | None = None
        # The status that tells its own state: 200 is active and unsealed.
        self.sealed = 200
        self.tokens_seen: list[str] = []
        self.connections = 0
        self.reached = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.revoked = threading.Event()
        self._numbers = itertools.count(1)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.01), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def put(self, path: str, *, expires: str | None = None, deletion_time: str = "", **data: Any) -> None:
        """Store a new version under `MOUNT/data/PATH`."""
        version = self.secrets.get(path, {}).get("metadata", {}).get("version", 0) + 1
        custom = None if expires is None else {"expires": expires}
        metadata = {"version": version, "deletion_time": deletion_time, "custom_metadata": custom}
        self.secrets[path] = {"data": data, "metadata": metadata}

    def delete(self, path: str) -> None:
        """Delete the latest version, as Vault does: the metadata stays."""
        secret = self.secrets[path]
        self.secrets[path] = {"data": None, "metadata": {**secret["metadata"], "deletion_time": "2020-01-01T00:00:00Z"}}

    def answer(self, method: str, path: str, headers: Json, body: Json) -> tuple[int, Json | None]:
        """The status and the document of one request."""
        if path == "/service":
            return (200 if headers.get("X-Credential") in self.leases.values() else 401), {}
        if path == "/v1/sys/health":  # needs no token
            return self.sealed, {"sealed": self.sealed == 503}
        self.tokens_seen.append(headers.get("X-Vault-Token", ""))
        self.reached.set()
        assert self.gate.wait(60)
        if self.fails is not None:
            return self.fails[0], {"errors": [self.fails[1]]}
        if headers.get("X-Vault-Token") != TOKEN:
            return 403, {"errors": ["permission denied"]}
        where = path.removeprefix("/v1/")
        if method == "PUT" and where == "sys/leases/revoke":
            self.leases.pop(body["lease_id"], None)
            self.revoked.set()
            return 204, None
        if method == "PUT" and where == "sys/leases/renew":
            if not self.renews:
                return 403, {"errors": ["permission denied"]}
            # As Vault does: counted from now, and cut to what the role allows.
            self.terms[body["lease_id"]] = min(body["increment"], self.longest_s)
            return 200, {"lease_id": body["lease_id"], "lease_duration": self.terms[body["lease_id"]]}
        if "/creds/" in where:
            return 200, self._issue(where)
        secret = self.secrets.get(where)
        if secret is None:
            return 404, {"errors": []}
        return (404 if secret["data"] is None else 200), {"data": secret}

    def _issue(self, where: str) -> Json:
        number = next(self._numbers)
        lease, password = f"{where}/{number}", f"issued-password-{number}"
        self.leases[lease], self.terms[lease] = password, self.lease_duration
        data = {"username": f"v-reader-{number}", "password": password}
        term = {"lease_duration": self.lease_duration, "renewable": self.renewable}
        return {"lease_id": lease, **term, "data": data}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                fake.connections += 1
                super().setup()

            def _serve(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = cast("Json", json.loads(raw)) if raw else {}
                status, document = fake.answer(self.command, self.path, dict(self.headers), body)
                if fake.redirect_to is not None and self.path != "/service":
                    status, document = 307, {}
                encoded = b"" if document is None else json.dumps(document).encode()
                self.send_response(status)
                if fake.redirect_to is not None:
                    self.send_header("Location", fake.redirect_to + self.path)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)

            do_GET = do_PUT = _serve  # noqa: N815 - the names that http.server looks for

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parameter's name in http.server
                pass

        return Handler

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
