"""TLS and mutual TLS: who has the right certificate is who the certificate says, and nobody else gets in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from rig.caller import Caller
from rig.memory import PosixMemory
from rig.pki import Authority, Certificate
from rig.process import wait_for
from rig.server import Running, running, spawn

import dqkv
from dqkv import errors
from dqkv.server.tls import server_credentials
from dqkv.settings import Settings, SettingsInvalid
from dqkv.v1 import gradient_pb2 as pb

FIRST, SECOND = "trainer-1.example", "trainer-2.example"
ONCE = dqkv.Retry(attempts=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pki")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Authority:
    return Authority(folder, "ours")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Authority:
    return Authority(folder, "theirs")


@pytest.fixture(scope="module")
def own(ours: Authority) -> Certificate:
    return ours.issue("127.0.0.1")


@pytest.fixture(scope="module")
def mutual(ours: Authority, own: Certificate) -> Iterator[Running]:
    """A server that asks its callers for certificates of ours; without devices, for nothing is computed here."""
    files = {"tls_cert": str(own.certificate), "tls_key": str(own.key), "tls_client_ca": str(ours.root)}
    with running(cpu_devices="0", **files) as server:
        yield server


def credentials(root: Path, mine: Certificate | None) -> grpc.ChannelCredentials:
    if mine is None:
        return grpc.ssl_channel_credentials(root.read_bytes())
    return grpc.ssl_channel_credentials(root.read_bytes(), mine.key.read_bytes(), mine.certificate.read_bytes())


def as_client(server: Running, tls: dqkv.Tls | None) -> dqkv.Client:
    return dqkv.Client(server.target, tls=tls, retry=ONCE, timeout_s=120)


def test_a_caller_with_the_right_certificate_is_whom_its_san_names(mutual: Running, ours: Authority) -> None:
    """The common name says something else, and what the caller says of itself in metadata does not count."""
    first, second = (credentials(ours.root, ours.issue(name)) for name in (FIRST, SECOND))
    with (
        Caller(mutual, credentials=first) as one,
        Caller(mutual, credentials=first) as same,
        Caller(mutual, credentials=second) as other,
        PosixMemory(4096) as memory,
    ):
        handle = one.register(memory)
        assert [region.handle for region in same.list_regions()] == [handle], "a second connection is the same caller"
        other.metadata += [
            ("dqkv-session", one.ask(one.facts.GetCapabilities, pb.GetCapabilitiesRequest()).session),
            ("x-forwarded-client-cert", FIRST),
        ]
        assert other.list_regions() == []
        released = other.refused(other.regions.ReleaseRegion, pb.ReleaseRegionRequest(handle=handle))
        assert (released.code, released.reason) == (grpc.StatusCode.NOT_FOUND, "REGION_UNKNOWN")

    def callers() -> set[str]:
        return {event["caller"] for event in mutual.events if event.get("event") == "request"}

    wait_for(lambda: {f"cert:{FIRST}", f"cert:{SECOND}"} <= callers(), "both are in the log by these names")


def test_the_client_library_presents_its_certificate_and_trusts_the_servers(mutual: Running, ours: Authority) -> None:
    mine = ours.issue(FIRST)
    with as_client(mutual, dqkv.Tls(root_ca=ours.root, certificate=mine.certificate, key=mine.key)) as client:
        assert client.capabilities().stream_port == mutual.address["stream_port"]


@pytest.mark.parametrize("port", ["channel", "bulk"])
@pytest.mark.parametrize("wrong", ["another_authority", "expired", "none"])
def test_a_caller_with_a_wrong_certificate_fails_the_handshake(
    mutual: Running, ours: Authority, theirs: Authority, wrong: str, port: str
) -> None:
    """Wrong CA, expired, none: no call of theirs reaches the server, on either port."""
    mine = {
        "another_authority": theirs.issue(FIRST),
        "expired": ours.issue(FIRST, days=-1),
        "none": None,
    }[wrong]
    before = mutual.metric("grpc_server_started_total")
    with Caller(mutual, credentials=credentials(ours.root, mine)) as caller:
        call = getattr(caller, port).unary_unary("/dqkv.v1.CapabilityService/GetCapabilities")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=120)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert mutual.metric("grpc_server_started_total") == before


@pytest.mark.parametrize("wrong", ["another_root", "another_name", "no_tls", "no_certificate"])
def test_the_client_library_refuses_a_server_that_is_not_the_one_it_wants(
    mutual: Running, ours: Authority, theirs: Authority, wrong: str
) -> None:
    """A server of another authority, or whose certificate names another host, is never sent a request."""
    mine = ours.issue(FIRST)
    files = {"certificate": mine.certificate, "key": mine.key}
    tls = {
        "another_root": dqkv.Tls(root_ca=theirs.root, **files),
        "another_name": dqkv.Tls(root_ca=ours.root, server_name="gradients.example", **files),
        "no_tls": None,
        "no_certificate": dqkv.Tls(root_ca=ours.root),
    }[wrong]
    with as_client(mutual, tls) as client, pytest.raises(errors.TransportError):
        client.capabilities()


# ---- files that would fail every handshake are refused at the start
def _other_key(ours: Authority, folder: Path) -> dict[str, Path]:
    return {"tls_key": ours.issue(SECOND).key}


def _key_of_another_kind(ours: Authority, folder: Path) -> dict[str, Path]:
    return {"tls_key": write_key(folder / "rsa.key", rsa.generate_private_key(65537, 2048))}


def _locked_key(ours: Authority, folder: Path) -> dict[str, Path]:
    own = ours.issue("locked.example")
    key = serialization.load_pem_private_key(own.key.read_bytes(), None)
    return {"tls_cert": own.certificate, "tls_key": write_key(own.key, key, password=b"hidden-word")}


def _broken_key(ours: Authority, folder: Path) -> dict[str, Path]:
    path = folder / "broken.key"
    path.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    return {"tls_key": path}


def _no_key(ours: Authority, folder: Path) -> dict[str, Path]:
    return {"tls_key": ours.root}


def _missing_key(ours: Authority, folder: Path) -> dict[str, Path]:
    return {"tls_key": folder / "none.key"}


def _no_certificate(ours: Authority, folder: Path) -> dict[str, Path]:
    return {"tls_cert": ours.issue(FIRST).key}


def _broken_certificate(ours: Authority, folder: Path) -> dict[str, Path]:
    path = folder / "broken.pem"
    path.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    return {"tls_cert": path}


def _expired(ours: Authority, folder: Path) -> dict[str, Path]:
    own = ours.issue("expired.example", days=-1)
    return {"tls_cert": own.certificate, "tls_key": own.key}


def _early(ours: Authority, folder: Path) -> dict[str, Path]:
    own = ours.issue("early.example", days=30, lasting=29)
    return {"tls_cert": own.certificate, "tls_key": own.key}


def _no_authority(ours: Authority, folder: Path) -> dict[str, Path]:
    path = folder / "empty.pem"
    path.write_text("# no certificate yet\n")
    return {"tls_client_ca": path}


def _broken_authority(ours: Authority, folder: Path) -> dict[str, Path]:
    return {"tls_client_ca": _broken_certificate(ours, folder)["tls_cert"]}


REFUSED: dict[Callable[[Authority, Path], dict[str, Path]], tuple[str, str]] = {
    _other_key: ("DQKV_TLS_KEY", "is not the key of DQKV_TLS_CERT"),
    _key_of_another_kind: ("DQKV_TLS_KEY", "is not the key of DQKV_TLS_CERT"),
    _locked_key: ("DQKV_TLS_KEY", "password"),
    _broken_key: ("DQKV_TLS_KEY", "holds no private key"),
    _no_key: ("DQKV_TLS_KEY", "holds no private key"),
    _missing_key: ("DQKV_TLS_KEY", "No such file"),
    _no_certificate: ("DQKV_TLS_CERT", "holds no certificate"),
    _broken_certificate: ("DQKV_TLS_CERT", "holds no certificate"),
    _expired: ("DQKV_TLS_CERT", "has expired"),
    _early: ("DQKV_TLS_CERT", "is not valid yet"),
    _no_authority: ("DQKV_TLS_CLIENT_CA", "holds no certificate"),
    _broken_authority: ("DQKV_TLS_CLIENT_CA", "holds no certificate"),
}


@pytest.mark.parametrize("wrong", REFUSED, ids=lambda wrong: wrong.__name__[1:])
def test_files_that_no_handshake_would_survive_are_refused_by_their_settings(
    ours: Authority,
    own: Certificate,
    tmp_path: Path,
    wrong: Callable[[Authority, Path], dict[str, Path]],
) -> None:
    right = {"tls_cert": own.certificate, "tls_key": own.key, "tls_client_ca": ours.root}
    given = wrong(ours, tmp_path)
    with pytest.raises(SettingsInvalid) as caught:
        server_credentials(Settings.load(**(right | given)))
    setting, words = REFUSED[wrong]
    assert str(caught.value).startswith(setting)
    assert words in str(caught.value)
    assert str(next(iter(given.values()))) in str(caught.value) or str(list(given.values())[-1]) in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_right_files_are_taken_a_chain_included(ours: Authority, own: Certificate, tmp_path: Path) -> None:
    chain = tmp_path / "chain.pem"
    chain.write_bytes(own.certificate.read_bytes() + ours.root.read_bytes())
    for certificate in (own.certificate, chain):
        settings = Settings.load(tls_cert=certificate, tls_key=own.key, tls_client_ca=ours.root)
        assert server_credentials(settings) is not None
    assert server_credentials(Settings.load()) is None


def test_a_server_with_the_key_of_another_certificate_says_so_and_ends(ours: Authority, own: Certificate) -> None:
    process = spawn(cpu_devices="0", tls_cert=str(own.certificate), tls_key=str(ours.issue(SECOND).key))
    _, words = process.communicate(timeout=120)
    assert process.returncode == 1
    last = json.loads(words.splitlines()[-1])
    assert last["event"] == "cannot start"
    assert "is not the key of DQKV_TLS_CERT" in last["reason"]
    assert "another server" not in words


def write_key(path: Path, key: Any, *, password: bytes | None = None) -> Path:
    lock = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))
    return path


def test_tls_without_client_certificates_serves_whoever_trusts_it(ours: Authority, own: Certificate) -> None:
    files = {"tls_cert": str(own.certificate), "tls_key": str(own.key)}
    with running(cpu_devices="0", tokens="one:gradient:secret-1", **files) as server:
        with dqkv.Client(server.target, tls=dqkv.Tls(root_ca=ours.root), token="secret-1", retry=ONCE) as client:
            assert client.capabilities().stream_port == server.address["stream_port"]
        with (
            dqkv.Client(server.target, tls=dqkv.Tls(root_ca=ours.root), token="secret-2", retry=ONCE) as client,
            pytest.raises(errors.Unauthenticated),
        ):
            client.capabilities()
        with as_client(server, None) as client, pytest.raises(errors.TransportError):
            client.capabilities()
