"""Where a server listens: loopback unless told otherwise, at ports of its own, never openly by accident."""

from __future__ import annotations

import ipaddress
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rig.caller import Caller
from rig.pki import Authority
from rig.server import Running, running, spawn

from dqkv.v1 import gradient_pb2 as pb


def how_it_ended(**settings: str) -> tuple[int, str]:
    """Exit code and words of a server that is expected not to start."""
    process = spawn(cpu_devices="0", **settings)
    try:
        _, words = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        _, words = process.communicate()
        raise AssertionError(f"it started:\n{words}") from None
    return process.returncode, words


def own_address() -> str | None:
    """An address of this machine that others reach; None without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # A datagram socket is only told the address that it would use; nothing is sent.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def listening(port: int) -> set[str]:
    """The addresses at which somebody listens at a port, as the kernel tells them."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    local = (row[1].rpartition(":") for row in rows if row[3] == "0A")
    return {str(address_of(address)) for address, _, number in local if int(number, 16) == port}


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address of /proc/net: words of four bytes, each in the order of this machine, in hexadecimal."""
    words = (int(text[start : start + 8], 16) for start in range(0, len(text), 8))
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    if len(packed) == 4:
        return ipaddress.IPv4Address(packed)
    whole = ipaddress.IPv6Address(packed)
    return whole.ipv4_mapped or whole


def test_a_server_listens_at_loopback_alone_unless_told_otherwise(server: Running) -> None:
    assert server.address["host"] == "127.0.0.1"
    for port in ("grpc_port", "stream_port", "http_port"):
        assert listening(server.address[port]) == {"127.0.0.1"}
    address = own_address()
    if address is not None:
        for port in ("grpc_port", "stream_port", "http_port"):
            with pytest.raises(OSError):  # noqa: PT011 - refused or unreachable, as the machine's rules have it
                socket.create_connection((address, server.address[port]), timeout=2)


@pytest.mark.parametrize(
    ("setting", "port"), [("port", "grpc_port"), ("stream_port", "stream_port"), ("http_port", "http_port")]
)
def test_a_second_server_at_a_taken_port_refuses_to_start(server: Running, setting: str, port: str) -> None:
    code, words = how_it_ended(**{setting: str(server.address[port])})
    assert code == 1
    assert f"DQKV_{setting.upper()}" in words
    assert str(server.address[port]) in words
    assert "another server" in words
    assert "Traceback" not in words
    last = json.loads(words.splitlines()[-1])
    assert last["event"] == "cannot start"
    assert f"DQKV_{setting.upper()}" in last["reason"]
    assert not any(word in words for word in ("draining", "drained", "shutting down")), "it never ran"
    with Caller(server) as caller:
        assert caller.ask(caller.facts.GetCapabilities, pb.GetCapabilitiesRequest()).devices, "the first one goes on"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gradients.example"])
def test_a_bind_beyond_loopback_without_tls_is_refused_in_words(host: str) -> None:
    code, words = how_it_ended(host=host)
    assert code == 1
    assert host in words
    assert "DQKV_TLS_CERT" in words
    assert "DQKV_INSECURE_BIND" in words
    assert "Traceback" not in words


def test_a_bind_beyond_loopback_works_when_told_that_it_is_meant() -> None:
    with running(cpu_devices="0", host="0.0.0.0", insecure_bind="true") as server, Caller(server) as caller:
        assert listening(server.address["grpc_port"]) & {"0.0.0.0", "::"}
        assert caller.ask(caller.facts.GetCapabilities, pb.GetCapabilitiesRequest()).version


def test_a_bind_beyond_loopback_works_with_tls(tmp_path: Path) -> None:
    own = Authority(tmp_path, "ours").issue("127.0.0.1")
    with running(cpu_devices="0", host="0.0.0.0", tls_cert=str(own.certificate), tls_key=str(own.key)) as server:
        assert listening(server.address["stream_port"]) & {"0.0.0.0", "::"}


def test_a_unix_socket_of_a_living_server_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "dqkv.sock"
    with running(cpu_devices="0", unix_socket=str(path)):
        code, words = how_it_ended(unix_socket=str(path))
        assert code == 1
        assert "DQKV_UNIX_SOCKET" in words
        assert "drain" not in words
        assert path.is_socket(), "the first one goes on"


@pytest.mark.parametrize(("setting", "named"), [("host", "DQKV_PORT"), ("http_host", "DQKV_HTTP_PORT")])
@pytest.mark.parametrize("address", ["192.0.2.1", "nowhere.invalid"])
def test_an_address_that_is_not_this_machines_is_refused_in_words(setting: str, named: str, address: str) -> None:
    code, words = how_it_ended(**{setting: address, "insecure_bind": "true"})
    assert code == 1
    assert address in words
    assert named in words
    assert "another server" not in words, "nobody is there"
    assert "Traceback" not in words


# ---- what is open without anybody's asking
def warnings(server: Running) -> set[str]:
    return {event["event"] for event in server.events if event.get("level") == "warning"}


def test_http_stays_at_loopback_when_grpc_leaves_it_and_secrets_in_the_clear_are_warned_of() -> None:
    with running(cpu_devices="0", host="0.0.0.0", insecure_bind="true", tokens="one:gradient:hidden") as server:
        assert listening(server.address["http_port"]) == {"127.0.0.1"}
        assert warnings(server) == {"tokens travel in the clear"}
        assert "hidden" not in "".join(server.lines)


def test_http_is_open_to_others_only_when_told_and_with_a_warning() -> None:
    with running(cpu_devices="0", http_host="0.0.0.0") as server:
        assert listening(server.address["http_port"]) == {"0.0.0.0"}
        assert listening(server.address["grpc_port"]) == {"127.0.0.1"}
        assert warnings(server) == {"HTTP is open to others"}


def test_what_is_not_dangerous_is_not_warned_of(tmp_path: Path) -> None:
    own = Authority(tmp_path, "ours").issue("127.0.0.1")
    for settings in (
        {"tokens": "one:gradient:hidden"},
        {
            "tokens": "one:gradient:hidden",
            "host": "0.0.0.0",
            "tls_cert": str(own.certificate),
            "tls_key": str(own.key),
        },
    ):
        with running(cpu_devices="0", **settings) as server:
            assert warnings(server) == set()
