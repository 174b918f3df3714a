"""The channels of a gRPC upstream: one for each endpoint, which all calls share.

Names are resolved under `net.addresses`, and a channel connects to the addresses that were checked there. A call waits
until its channel is connected before it is sent, so that an unreachable server has surely received nothing. A channel
that does not connect is closed when its last call has ended, and the name is resolved anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from interlock.net import addresses
from interlock.upstreams import wire

if TYPE_CHECKING:
    import grpc
    import grpc.aio

    from interlock.upstreams.grpc_config import GrpcConfig


class Channel:
    """A channel of the library, and how many calls use it."""

    __slots__ = ("channel", "retired", "users")

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.users = 0
        self.retired = False


class Channels:
    """The channels of one upstream, by endpoint."""

    def __init__(self, name: str, config: GrpcConfig, resolve: addresses.Resolve) -> None:
        self._name = name
        self._config = config
        self._resolve = resolve
        self._channels: dict[str, Channel] = {}
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for one in channels.values():
            await one.channel.close(None)

    @asynccontextmanager
    async def get(self, target: str) -> AsyncGenerator[Channel]:
        """The connected channel of an endpoint. A retired one gets no more calls, and is closed after its last."""
        one = self._channels.get(target)
        if one is None:
            async with self._opening:
                one = self._channels.get(target)
                if one is None:
                    one = self._channels[target] = Channel(await self._open(target))
        one.users += 1
        try:
            if not await self._connected(one.channel):
                one.retired = True
                raise wire.unreached(self._name)
            yield one
        finally:
            one.users -= 1
            if one.retired and self._channels.get(target) is one:
                del self._channels[target]
            if one.retired and not one.users:
                await one.channel.close(None)

    async def _connected(self, channel: grpc.aio.Channel) -> bool:
        from grpc import ChannelConnectivity as State
        from grpc.aio import UsageError

        try:
            if channel.get_state(try_to_connect=True) is State.READY:
                return True  # as nearly always
            async with asyncio.timeout(self._config.connect_timeout_s):
                while (state := channel.get_state(try_to_connect=True)) is not State.READY:
                    if state in (State.TRANSIENT_FAILURE, State.SHUTDOWN):
                        return False
                    await channel.wait_for_state_change(state)
        except (TimeoutError, UsageError):
            return False  # too slow, or closed meanwhile
        return True

    async def _open(self, target: str) -> grpc.aio.Channel:
        import grpc
        import grpc.aio

        host, _, port = target.rpartition(":")
        host = host.strip("[]")
        try:
            addresses_ = await addresses.checked(host, allow_private=self._config.allow_private, resolve=self._resolve)
        except OSError:
            raise wire.unreached(self._name, "has a name without an address") from None
        pinned = addresses.grpc_target(addresses_, port)
        options: list[tuple[str, Any]] = [
            ("grpc.default_authority", target),
            ("grpc.max_receive_message_length", self._config.max_response_bytes),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),  # retries are decided here
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.keepalive_time_ms", 300_000),  # servers hang up on clients that ping more often
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.primary_user_agent", "interlock"),
        ]
        if self._config.plaintext:
            return grpc.aio.insecure_channel(pinned, options=options)
        # The certificate is checked for the name, although the channel connects to an address.
        options.append(("grpc.ssl_target_name_override", host))
        return grpc.aio.secure_channel(pinned, self._credentials, options=options)

    @cached_property
    def _credentials(self) -> grpc.ChannelCredentials:
        import grpc

        tls = self._config.tls
        return grpc.ssl_channel_credentials(tls.read("ca_file"), tls.read("key_file"), tls.read("cert_file"))
