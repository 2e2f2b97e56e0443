"""TLS and mutual TLS: who has the right certificate is who the certificate says, and nobody else gets in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from rig.caller import Caller
from rig.memory import PosixMemory
from rig.pki import Authority, Certificate
from rig.server import Running, running

import dqkv
from dqkv import errors
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
    return dqkv.Client(server.target, tls=tls, retry=ONCE, timeout_s=10)


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
    callers = {event["caller"] for event in mutual.events if event.get("event") == "request" and event["caller"]}
    assert {f"cert:{FIRST}", f"cert:{SECOND}"} <= callers


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
            call(b"", timeout=10)
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
