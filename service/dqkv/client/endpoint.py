"""Where a server is and how to prove who asks: its address, TLS, a bearer token, and the channels made of them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from dqkv import errors

MIB = 1 << 20
UNIX_PREFIXES = ("unix:", "unix-abstract:")
FORMS = 'must be "host:port" with a port of 1 to 65535, "[::1]:port" or "unix:/path"'
PORT_LIMIT = 65535
_NETWORK = re.compile(
    r"(?P<scheme>dns:(?://[^/\s]*/)?|ipv4:|ipv6:)?(?:\[(?P<ipv6>[^\]\s]+)\]|(?P<host>[^\s/:@\[\]?#,]+)):(?P<port>[0-9]{1,5})"
)
"""host:port, with or without one of gRPC's own schemes."""

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    # The server's own bound on a unary message is smaller or equal; larger ones are streams.
    ("grpc.max_send_message_length", 64 * MIB),
    ("grpc.max_receive_message_length", 64 * MIB),
    # Larger frames move bulk data 1.2 to 1.3 times as fast as the default 16 KiB.
    ("grpc.http2.max_frame_size", 16 * MIB - 1),
    # The next frames arrive while one is copied to its place.
    ("grpc.http2.lookahead_bytes", 16 * MIB),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # What may be sent again is decided by the reason of the error, not by the transport.
    ("grpc.enable_retries", 0),
    # A name with several addresses is several servers: calls go round them, and past one that is gone.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    # The default of 30 s would leave a client long with the servers that are left, while new ones wait.
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),
    # Two clients of one process do not share a connection, nor its flow control.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """TLS of a connection, all as PEM files. Raises OptionInvalid when a client certificate comes without its key.

    root_ca: whom to trust, None is what gRPC trusts by itself. certificate, key: who we are, for mutual TLS.
    server_name: the name in the server's certificate, where it is not the address's host.
    """

    root_ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise errors.OptionInvalid("a client certificate needs its key, and a key its certificate", field="tls")

    def credentials(self) -> grpc.ChannelCredentials:
        """What gRPC takes. Raises OptionInvalid when a file cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read("tls.root_ca", self.root_ca),
            private_key=_read("tls.key", self.key),
            certificate_chain=_read("tls.certificate", self.certificate),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A server's address ("host:port", "[::1]:port", "unix:/path"), TLS (None is none), and a token (None is none).

    dns:, ipv4: and ipv6: may stand before host and port; white space around the token does not count. Raises
    OptionInvalid for an address or a token that cannot be one.
    """

    address: str
    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_address(self.address)
        if self.token is not None:
            _check_token(self.token)

    def channel(self) -> grpc.Channel:
        """A channel of its own, not yet connected."""
        options: Sequence[tuple[str, str | int]] = CHANNEL_OPTIONS
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=options)
        if self.tls.server_name is not None:
            options = (*options, ("grpc.ssl_target_name_override", self.tls.server_name))
        return grpc.secure_channel(self.address, self.tls.credentials(), options=options)

    def with_port(self, port: int) -> Endpoint:
        """The same server at another port; a server behind a unix socket has its ports on this machine's loopback."""
        return Endpoint(address=f"{self._host()}:{port}", tls=self.tls, token=self.token)

    def metadata(self) -> list[tuple[str, str]]:
        """What every call carries."""
        return [] if self.token is None else [("authorization", f"Bearer {self.token.strip()}")]

    def _host(self) -> str:
        """What stands before the port, scheme included where it names a resolver."""
        found = _NETWORK.fullmatch(self.address)
        if found is None:
            return "127.0.0.1"
        bare = found["host"] or f"[{found['ipv6']}]"
        scheme = found["scheme"] or ""
        return f"{scheme}{bare}" if scheme.startswith("dns:") else bare


def _check_address(address: str) -> None:
    if address.startswith(UNIX_PREFIXES) and address not in UNIX_PREFIXES:
        return
    found = _NETWORK.fullmatch(address)
    if found is not None and 1 <= int(found["port"]) <= PORT_LIMIT and _is_ipv6(found["ipv6"]):
        return
    raise errors.OptionInvalid(f"address is {address!r}, {FORMS}", field="address")


def _is_ipv6(host: str | None) -> bool:
    """Whether what stands in brackets may; nothing does."""
    try:
        return host is None or ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _check_token(token: str) -> None:
    # The token itself is not shown: messages end up in logs.
    if not token.strip():
        raise errors.OptionInvalid("token is empty", field="token")
    if not (token.strip().isascii() and token.strip().isprintable()):
        raise errors.OptionInvalid("token holds a character that is not printable ASCII", field="token")


def _read(name: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise errors.OptionInvalid(f"{name} cannot be read: {error.strerror}", field=name) from None
