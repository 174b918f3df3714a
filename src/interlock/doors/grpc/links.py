"""Shares the gRPC door's connections among peers: no single address can take all of them, or all files of the process.

grpcio accepts connections itself. It bounds their total, but not those of one peer, and it offers no way to close one.
Its sockets are files of this process, though. So they are found among the process's files by the port they are bound
to, counted by peer, and those over a cap are shut down, which grpcio notices as it notices a client that leaves.

    new connection ─► epoll on the listening socket ─► a look at the process's files, 20 ms later ─► shut down excess

Of a peer over its cap, the connections without a call under way are shut down first, longest idle first; then the
newest. When the door is nearly full, the peers that hold most are treated the same way. A call costs nothing here: what
calls are under way is asked only when something must be shut down.

A peer is an IP address. A reverse proxy is one peer for all the clients behind it; its operator raises
`max_connections_per_peer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import select
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterable
from urllib.parse import unquote

from interlock.doors.grpc.core_threads import CoreThreads

# How long after a connection has come the files are looked at: grpcio has accepted it by then, and others with it.
SOON_S = 0.02
# They are looked at this often in any case: a connection may be accepted late.
OFTEN_S = 1.0
# New sockets that are read in one turn of the event loop; each takes some 40 µs.
_READ_AT_ONCE = 16
_FILES = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
# Where struct tcp_info has the milliseconds since data last came and went.
_SENT, _RECEIVED = 44, 52

Peer = tuple[str, int]


class _Link:
    """One accepted connection of the door."""

    def __init__(self, fd: int, inode: int, peer: Peer, number: int) -> None:
        self.fd = fd
        self.inode = inode
        self.peer = peer
        self.number = number

    def idle_ms(self) -> int:
        """Seconds since anything was sent or received; 0 where the system does not report it."""
        with contextlib.suppress(OSError, AttributeError, struct.error), _held(self.fd, self.inode) as held:
            info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            return min(struct.unpack_from("I", info, at)[0] for at in (_SENT, _RECEIVED))
        return 0

    def shut(self) -> None:
        with contextlib.suppress(OSError), _held(self.fd, self.inode) as held:
            held.shutdown(socket.SHUT_RDWR)


class Links:
    """The connections of one listening port of this process, bounded in all and by peer."""

    def __init__(self, port: int, *, most: int, most_per_peer: int, busy: Callable[[], Iterable[str]]) -> None:
        """`busy` gives the peers of the calls under way, as gRPC writes them."""
        self._port = port
        # grpcio refuses what comes when the door is full. Some room is kept, so that peers with few links get in.
        self._most = max(1, most - most // 8)
        self._most_per_peer = most_per_peer
        self._busy = busy
        self._loop = asyncio.get_running_loop()
        # What is known of each socket of the process, by inode; None of those that are not links of the door.
        self._known: dict[int, _Link | None] = {}
        self._number = 0
        self._threads = CoreThreads()
        self._listening: list[socket.socket] = []
        self._bell = select.epoll() if hasattr(select, "epoll") else None
        self._next = self._loop.call_later(0, self._look)
        # Whether a look is due soon, is under way, and is to be followed by another.
        self._soon = self._reading = self._again = False
        self._watch()

    def __len__(self) -> int:
        return sum(1 for link in self._known.values() if link is not None)

    def close(self) -> None:
        """Look no more."""
        self._next.cancel()
        if self._bell is not None:
            self._loop.remove_reader(self._bell.fileno())
            self._bell.close()
        for one in self._listening:
            one.close()

    def _watch(self) -> None:
        """Hear of every connection that comes to the listening sockets."""
        if self._bell is None:
            return
        for fd, inode in _sockets():
            with contextlib.suppress(OSError):
                held = _held(fd, inode)
                if _port(held) == self._port and held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._listening.append(held)
                    self._bell.register(held.fileno(), select.EPOLLIN | select.EPOLLET)
                else:
                    held.close()
        self._loop.add_reader(self._bell.fileno(), self._rung)

    def _rung(self) -> None:
        assert self._bell is not None
        self._bell.poll(0)
        if self._reading:
            self._again = True
        elif not self._soon:
            self._soon = True
            self._next.cancel()
            self._next = self._loop.call_later(SOON_S, self._look)

    def _look(self) -> None:
        self._reading, self._again = True, False
        self._threads.lower_priority()
        there = list(_sockets())
        self._known = {inode: self._known[inode] for _, inode in there if inode in self._known}
        self._read_some([one for one in there if one[1] not in self._known])

    def _read_some(self, new: list[tuple[int, int]]) -> None:
        """Read what new sockets are, a few in each turn of the event loop: all together would hold up every call."""
        for fd, inode in new[:_READ_AT_ONCE]:
            self._known[inode] = self._link(fd, inode)
        if len(new) > _READ_AT_ONCE:
            self._next = self._loop.call_later(0, self._read_some, new[_READ_AT_ONCE:])
            return
        self._reading, self._soon = False, self._again
        self._next = self._loop.call_later(SOON_S if self._again else OFTEN_S, self._look)
        self._make_room([link for link in self._known.values() if link is not None])

    def _link(self, fd: int, inode: int) -> _Link | None:
        with contextlib.suppress(OSError), _held(fd, inode) as held:
            # A listening socket has no peer, and raises.
            if _port(held) == self._port:
                host, port = held.getpeername()[:2]
                self._number += 1
                return _Link(fd, inode, (_plain(host), port), self._number)
        return None

    def _make_room(self, links: list[_Link]) -> None:
        if len(links) <= min(self._most, self._most_per_peer):
            return
        peers: dict[str, list[_Link]] = {}
        for link in links:
            peers.setdefault(link.peer[0], []).append(link)
        fair = _fair(sorted(map(len, peers.values())), self._most)
        over = {peer: theirs for peer, theirs in peers.items() if len(theirs) > min(fair, self._most_per_peer)}
        busy = {_read(one) for one in self._busy()} if over else set[Peer]()
        for theirs in over.values():
            ordered = sorted(theirs, key=lambda one: _rank(one, one.peer in busy))
            for link in ordered[: len(theirs) - min(fair, self._most_per_peer)]:
                link.shut()


def _rank(link: _Link, busy: bool) -> tuple[bool, int, int]:
    """The order in which links are shut down."""
    return (True, 0, -link.number) if busy else (False, -link.idle_ms(), link.number)


def _fair(sizes: list[int], most: int) -> int:
    """The largest number of links a peer may keep so that all together have no more than `most`."""
    left = most
    for at, size in enumerate(sizes):
        share = left // (len(sizes) - at)
        if size > share:
            return max(1, share)
        left -= size
    return most


def _sockets() -> Iterable[tuple[int, int]]:
    """The sockets of this process, as descriptor and inode."""
    try:
        names = os.listdir(_FILES)
    except OSError:  # all files of the process are in use: the next look may find them freed
        return
    for name in names:
        with contextlib.suppress(OSError):
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), found.st_ino


def _held(fd: int, inode: int) -> socket.socket:
    """The socket, through a descriptor of our own. grpcio may close its own at any time, and its number be reused."""
    own = os.dup(fd)
    if os.fstat(own).st_ino != inode:
        os.close(own)
        raise OSError("the connection has ended")
    return socket.socket(fileno=own)


def _port(held: socket.socket) -> int | None:
    inet = held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM
    return held.getsockname()[1] if inet else None


def _read(peer: str) -> Peer:
    """The address and port of a peer as gRPC writes it: `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdecimal() else 0


def _plain(host: str) -> str:
    """An address in one form: IPv4 as such, where a socket for both writes it as IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
