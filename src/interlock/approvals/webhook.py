"""Signed webhooks in the form of Standard Webhooks, so that receivers can use an existing library.

A request carries three headers:

    webhook-id          the same for every attempt: a receiver that has seen it may ignore it
    webhook-timestamp   when this attempt was sent, in seconds
    webhook-signature   v1,base64(HMAC-SHA256(secret, id.timestamp.body)), one per valid secret, separated by spaces

The timestamp is signed, so an old request cannot be replayed later; several signatures let a secret be rotated without
losing a request. Requests are made with `net.outgoing`, which logs no address.
"""

from __future__ import annotations

import base64
import binascii
import email.utils
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from interlock.approvals.services import DeliveryOutcome
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.net import addresses
from interlock.net.outgoing import HttpAnswer, Outgoing, Trouble, Unanswered

if TYPE_CHECKING:
    import ssl

TOLERANCE_S = 300
TIMEOUT_S = 10.0
LONGEST_PAUSE_S = 24 * 3600
_PREFIX = "whsec_"


def read_secret(text: str) -> bytes:
    """Decode the key of a secret such as `whsec_…`: base64 of 24 to 64 bytes."""
    try:
        key = base64.b64decode(text.strip().removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not 24 <= len(key) <= 64:
        raise Failure("E3604", "a webhook's secret is `whsec_` and the base64 of 24 to 64 random bytes")
    return key


def sign(secrets: Sequence[str], message_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Make the three headers of a message."""
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(
            _signature(read_secret(secret), message_id, timestamp_s, body) for secret in secrets
        ),
    }


def verify(headers: Mapping[str, str], body: bytes, secret: str, now_s: float) -> None:
    """For receivers: raise a Failure (E3201, E3202, E3203) unless this secret signed this body within five minutes."""
    given = {name.lower(): value for name, value in headers.items()}
    try:
        message_id, timestamp = given["webhook-id"], int(given["webhook-timestamp"])
        signatures = given["webhook-signature"].split()
    except (KeyError, ValueError):
        raise Failure("E3203", "the webhook has no id, timestamp and signature that can be read") from None
    if abs(now_s - timestamp) > TOLERANCE_S:
        raise Failure("E3201", "the webhook was sent too long ago, or the clocks differ")
    expected = _signature(read_secret(secret), message_id, timestamp, body).encode()
    # Every signature is compared, in constant time, so that the duration does not reveal which was close.
    matches = [hmac.compare_digest(expected, signature.encode()) for signature in signatures]
    if not any(matches):
        raise Failure("E3202", "the webhook was not signed with this secret, or was changed on the way")


def _signature(key: bytes, message_id: str, timestamp_s: int, body: bytes) -> str:
    content = f"{message_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()


class Webhooks:
    """Sends signed requests over pooled connections, one pool for public receivers and one for private ones."""

    def __init__(
        self,
        clock: Clock,
        *,
        resolve: addresses.Resolve = addresses.resolve_by_system,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._clock = clock
        self._clients = {
            private: Outgoing("any" if private else "public", keep_alive=True, tls=ssl_context, resolve=resolve)
            for private in (False, True)
        }

    async def send(
        self, url: str, body: bytes, secrets: Sequence[str], message_id: str, *, allow_private: bool = False
    ) -> DeliveryOutcome:
        """Send once. Raises E3406 if the receiver's address is not allowed; everything else is an outcome."""
        headers = sign(secrets, message_id, self._clock.now_ms() // 1000, body)
        headers["content-type"] = "application/json"
        try:
            answer = await self._clients[allow_private].ask(
                "POST", url, headers=headers, body=body, most=0, timeout_s=TIMEOUT_S
            )
        except Unanswered as silence:
            return DeliveryOutcome("retry", _TROUBLES[silence.why])
        return self._outcome(answer)

    def _outcome(self, answer: HttpAnswer) -> DeliveryOutcome:
        status = answer.status
        if 200 <= status < 300:
            return DeliveryOutcome("sent")
        error = f"E3704 the receiver answered {status}"
        if status == 429 or status >= 500:
            return DeliveryOutcome("retry", error, wait_ms=self._pause_ms(answer.headers.get("retry-after", "")))
        if 300 <= status < 400:
            error += "; redirects are not followed, use the address it redirects to"
        return DeliveryOutcome("failed", error, gone=status == 410)

    def _pause_ms(self, given: str) -> int:
        """Read the pause that the receiver requests: seconds or a date."""
        if given.isascii() and given.isdecimal():
            return min(int(given[:9]), LONGEST_PAUSE_S) * 1000
        try:
            until_ms = int(email.utils.parsedate_to_datetime(given).timestamp() * 1000)
        except (ValueError, OverflowError):
            return 0
        return min(max(until_ms - self._clock.now_ms(), 0), LONGEST_PAUSE_S * 1000)

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.close()


_TROUBLES: Mapping[Trouble, str] = {
    "late": "E3704 the receiver did not answer in time",
    "unreachable": "E3704 the receiver cannot be reached",
    "flooded": "E3704 the receiver sent a flood of tiny pieces",
    "too long": "E3704 the receiver's answer is too long",
    "compressed": "E3704 the receiver's answer is compressed",
}
