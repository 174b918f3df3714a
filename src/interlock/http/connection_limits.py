"""Shares the server's connections among peers: no single address can take all of them.

A peer is an IP address. At its cap, or when the server is full, the connection that has been idle longest is closed to
make room: one of the same peer, or, when the server is full, one of the peer that holds most. A connection is idle when
no request on it is being answered. Where none is idle, the new connection is refused.

A reverse proxy is one peer for all the clients behind it; its operator raises `max_connections_per_peer`.
"""

from __future__ import annotations

from typing import Any, Protocol

MOST_PER_PEER = 1024


class Limited(Protocol):
    """The part of a connection that the limits use."""

    @property
    def idle_since(self) -> float | None:
        """When the last answer ended, or the connection began; None while a request is being answered."""
        ...

    def close_idle(self) -> None:
        """Close an idle connection."""
        ...


class ConnectionLimits:
    """All connections of one server, by peer."""

    def __init__(self, most: int, most_per_peer: int) -> None:
        self._most = most
        self._most_per_peer = most_per_peer
        self._peers: dict[str, dict[Limited, None]] = {}
        self._size = 0
        # Whether the server is about to end: every answer then closes its connection, and clients open another one.
        self.ending = False

    def __len__(self) -> int:
        return self._size

    def enter(self, connection: Limited, peer: str) -> bool:
        """Count a new connection. False if a limit is reached and no idle connection could be closed."""
        theirs = self._peers.setdefault(peer, {})
        room = True
        if len(theirs) >= self._most_per_peer:
            room = self._close_idlest(peer)
        elif self._size >= self._most:
            room = self._close_idlest(max(self._peers, key=lambda one: len(self._peers[one])))
        self._peers.setdefault(peer, {})[connection] = None
        self._size += 1
        return room

    def leave(self, connection: Limited, peer: str) -> None:
        """Stop counting a connection that has ended."""
        theirs = self._peers.get(peer)
        if theirs is not None and theirs.pop(connection, self) is None:
            self._size -= 1
            if not theirs:
                del self._peers[peer]

    def _close_idlest(self, peer: str) -> bool:
        idle = [(since, one) for one in self._peers[peer] if (since := one.idle_since) is not None]
        if not idle:
            return False
        connection = min(idle, key=lambda one: one[0])[1]
        self.leave(connection, peer)
        connection.close_idle()
        return True


def limits_of(server_state: Any, most: int, most_per_peer: int) -> ConnectionLimits:
    """The limits of a server, stored with its state."""
    found: ConnectionLimits | None = getattr(server_state, "interlock_limits", None)
    if found is None:
        found = server_state.interlock_limits = ConnectionLimits(most, most_per_peer)
    return found
