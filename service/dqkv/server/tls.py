"""The server's certificate and the CAs of its callers, as gRPC takes them."""

from __future__ import annotations

import grpc

from dqkv.settings import Settings, SettingsInvalid, read_file


def server_credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """Credentials for both gRPC ports, None where TLS is not configured. Raises SettingsInvalid for unreadable files.

    With client CAs, a caller without a certificate of theirs does not get through the handshake.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    chain = read_file(settings.tls_cert, "tls_cert")
    key = read_file(settings.tls_key, "tls_key")
    roots = None if settings.tls_client_ca is None else read_file(settings.tls_client_ca, "tls_client_ca")
    for setting, content, mark in (
        ("DQKV_TLS_CERT", chain, b"CERTIFICATE-----"),
        ("DQKV_TLS_KEY", key, b"PRIVATE KEY-----"),
        ("DQKV_TLS_CLIENT_CA", roots, b"CERTIFICATE-----"),
    ):
        # gRPC itself would start, and fail every handshake.
        if content is not None and mark not in content:
            raise SettingsInvalid(f"{setting} names a file that is no PEM of the right kind")
    return grpc.ssl_server_credentials([(key, chain)], roots, require_client_auth=roots is not None)
