"""Egress of sandboxed calls: the hosts they may reach, and the proxy that is their only connection.

A sandboxed process has a network of its own with nothing in it but `lo`. It listens there, hands the listening socket
to us and never sees it again; a client that speaks to a proxy inside then speaks to us, and no other packet leaves. One
`Egress` serves one call, so every refusal and every request belongs to that call.

    tool ─► lo:3128 in its namespace ═ our listener ─► read ─► judge ─► resolve ─► dial ─► the host that it named
                                                        │        │         │         │
                       by h11; nothing passes as bytes ─┘        │         │         └─ an address that was checked
                               both lists name host and port ────┘         └─ every address is public, or none is used

1. **A name is judged, then its addresses, and the connection goes to an address that was judged.** Judged means listed
   by the agent's allowance *and* the tool's manifest. Addresses in place of names are refused however they are written,
   unless both lists contain them in the same form.
2. **Every request is judged anew**, the second on a connection like the first. We follow no redirect: a client that
   does asks again, and is judged again.
3. **Nothing is passed on unread.** Plain requests are parsed and written anew by h11, one at a time, each on an
   upstream connection of its own; two readings of the same bytes cannot differ. A tunnel (CONNECT) must open with a TLS
   hello in clear that names the host it was opened for.
4. **The use of a call is bounded**: connections, requests, bytes, time. Connections beyond the bound wait outside.
5. **Requests are recorded before a byte of them leaves**, with their method, so that a tool that claims to be read-only
   can be checked. The content of TLS is not visible: the method of a tunnel is `CONNECT`.

`policy` judges, `target` and `hello` parse what the client sends, `wire` moves it, `conversation` is one connection and
`proxy` all of them.
"""

from __future__ import annotations

from interlock.executors.egress.policy import EgressPolicy, EgressRefusal, Limits, Seen, violation
from interlock.executors.egress.proxy import Egress

__all__ = ["Egress", "EgressPolicy", "EgressRefusal", "Limits", "Seen", "violation"]
