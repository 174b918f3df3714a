"""The configuration of an upstream that is a gRPC service."""

from __future__ import annotations

import pydantic

from interlock.upstreams.remote_config import RemoteConfig, keep_hidden


class GrpcConfig(RemoteConfig):
    """A gRPC service: `targets` are host:port. `services` names the ones to offer; by default all of them."""

    targets: tuple[str, ...] = pydantic.Field(min_length=1, max_length=3)
    plaintext: bool = False
    services: tuple[str, ...] = ()

    @pydantic.field_validator("targets")
    @classmethod
    def _addresses(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for target in targets:
            host, _, port = target.rpartition(":")
            if not host or "/" in target or "@" in target or not port.isdecimal():
                raise ValueError("a target is host:port")
        return targets

    @pydantic.model_validator(mode="after")
    def _usable(self) -> GrpcConfig:
        if self.auth is not None and self.auth.kind == "query":
            raise ValueError("gRPC has no query; show the credential as bearer, basic or header")
        keep_hidden(self, plain=self.plaintext)
        return self
