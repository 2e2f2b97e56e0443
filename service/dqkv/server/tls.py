"""The server's certificate and the CAs of its callers, as gRPC takes them, and whether they are of any use."""

from __future__ import annotations

import contextlib
import ssl
import time
from pathlib import Path

import grpc

from dqkv.settings import Settings, SettingsInvalid, read_file

_NOT_YET, _EXPIRED = 9, 10
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
_NO_PAIR = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""What OpenSSL says of a key that is another certificate's; the last one of a key of another kind, RSA for EC."""
_FLIGHTS = 4
"""Times that both sides of a handshake are asked to go on; TLS 1.3 is through after two."""


def server_credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """Credentials for both gRPC ports, None where TLS is not configured.

    With client CAs, a caller without a certificate of theirs does not get through the handshake. Raises SettingsInvalid
    for a file that cannot be read or is no PEM, for a key of another certificate or with a password, and for
    certificates that are not valid now: gRPC itself would start, and fail every handshake.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    chain = read_file(settings.tls_cert, "tls_cert")
    key = read_file(settings.tls_key, "tls_key")
    _count_certificates("DQKV_TLS_CERT", settings.tls_cert)
    _check_valid_now(_load_pair(settings.tls_cert, settings.tls_key), settings.tls_cert)
    if settings.tls_client_ca is None:
        return grpc.ssl_server_credentials([(key, chain)])
    roots = read_file(settings.tls_client_ca, "tls_client_ca")
    _check_authorities(settings.tls_client_ca)
    return grpc.ssl_server_credentials([(key, chain)], roots, require_client_auth=True)


def _count_certificates(setting: str, path: Path) -> ssl.SSLContext:
    store = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with contextlib.suppress(ssl.SSLError):
        store.load_verify_locations(cafile=path)
    if not store.cert_store_stats()["x509"]:
        raise SettingsInvalid(f"{setting} is {path}, which holds no certificate in PEM that can be read")
    return store


def _load_pair(certificate: Path, key: Path) -> ssl.SSLContext:
    def ask_for_password() -> bytes:
        raise SettingsInvalid(f"DQKV_TLS_KEY is {key}, which is locked with a password: give a key without one")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=ask_for_password)
    except ssl.SSLError as error:
        if error.reason in _NO_PAIR:
            raise SettingsInvalid(
                f"DQKV_TLS_KEY {key} is not the key of DQKV_TLS_CERT {certificate}, whose first certificate is "
                "the server's own"
            ) from None
        if b"PRIVATE KEY-----" not in read_file(key, "tls_key") or error.reason in ("PEM_LIB", "NO_START_LINE", None):
            raise SettingsInvalid(
                f"DQKV_TLS_KEY is {key}, which holds no private key in PEM that can be read"
            ) from None
        words = error.reason.replace("_", " ").lower()
        raise SettingsInvalid(f"DQKV_TLS_CERT {certificate} with DQKV_TLS_KEY {key} is of no use: {words}") from None
    return context


def _check_valid_now(server: ssl.SSLContext, certificate: Path) -> None:
    """Shakes hands with the server's side in memory, as a caller that trusts what is in the file."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(cafile=certificate)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (trusting.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    try:
        for side in sides * _FLIGHTS:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        words = {_NOT_YET: "is not valid yet", _EXPIRED: "has expired"}.get(error.verify_code)
        if words is not None:
            raise SettingsInvalid(f"DQKV_TLS_CERT is {certificate}, which {words}") from None


def _check_authorities(path: Path) -> None:
    ends = [certificate["notAfter"] for certificate in _count_certificates("DQKV_TLS_CLIENT_CA", path).get_ca_certs()]
    if ends and all(isinstance(end, str) and ssl.cert_time_to_seconds(end) < time.time() for end in ends):
        raise SettingsInvalid(f"DQKV_TLS_CLIENT_CA is {path}, whose certificates have all expired")
