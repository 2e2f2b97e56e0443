"""What a client is told when something is wrong, how it proves who it is, and that it goes on afterwards."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from rig.answers import arguments, assert_right, drawn_problem
from rig.pki import Authority
from rig.server import Running, eventually, running

import dqkv
from dqkv import errors
from dqkv.courier import Courier, Door, Transport
from dqkv.trials import Drawn

SHM = Path("/dev/shm")
PORTS = {"port": "grpc", "stream_port": "stream", "http_port": "http"}


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return drawn_problem()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[dqkv.Client]:
    with dqkv.Client(server.target, timeout_s=120) as one:
        yield one


@pytest.fixture(scope="module")
def streaming(server: Running) -> Iterator[dqkv.Client]:
    with dqkv.Client(server.target, timeout_s=120, inline_nbytes=-1) as one:
        yield one


def test_the_servers_refusal_arrives_with_reason_field_and_message(client: dqkv.Client, drawn: Drawn) -> None:
    with pytest.raises(errors.ArchUnavailable) as caught:
        client.backward(**arguments(drawn), arch="sm90")
    assert caught.value.reason == "ARCH_UNAVAILABLE"
    assert "sm90" in caught.value.message


def test_an_interrupted_stream_leaves_the_client_usable(server: Running, drawn: Drawn) -> None:
    rows = np.zeros((1, 16384, 2, 128), np.float16)

    async def interrupt() -> None:
        async with dqkv.AsyncClient(server.target) as one:
            task = asyncio.create_task(one.backward(rows, rows, rows, rows, out=rows))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert_right(drawn, await one.backward(**arguments(drawn)))

    asyncio.run(interrupt())


def test_a_server_that_comes_back_is_found_again(drawn: Drawn) -> None:
    with running(port="0") as first:
        ports = {name: str(first.address[f"{key}_port"]) for name, key in PORTS.items()}
        client = dqkv.Client(first.target, timeout_s=120, retry=dqkv.Retry(attempts=200, first_s=0.2, limit_s=0.5))
        assert_right(drawn, client.backward(**arguments(drawn)))
        first.stop()
    with running(**ports):
        assert_right(drawn, client.backward(**arguments(drawn)))
    client.close()


@pytest.mark.parametrize("inline_nbytes", [None, -1], ids=["unary", "stream"])
def test_a_server_killed_in_the_middle_is_noticed_at_once_and_the_request_goes_to_the_next(
    inline_nbytes: int | None, drawn: Drawn
) -> None:
    # 45 MiB up and 27 MiB down: nearly the most that fits one message, and seconds of work on a CPU.
    rows = np.zeros((1, 3072, 16, 96), np.float16)
    long = {"q": rows, "k": rows, "v": rows, "dout": rows, "out": rows}
    retry = dqkv.Retry(attempts=1000, first_s=0.1, limit_s=0.2)
    with running() as first, ThreadPoolExecutor(2) as pool:
        ports = {name: str(first.address[f"{key}_port"]) for name, key in PORTS.items()}
        settings = {"timeout_s": 250, "inline_nbytes": inline_nbytes or 1 << 27}
        patient, hasty = (dqkv.Client(first.target, retry=kind, **settings) for kind in (retry, dqkv.Retry(attempts=1)))
        with patient, hasty:
            answers = [pool.submit(one.backward, **long) for one in (patient, hasty)]
            eventually(lambda: first.metric("dqkv_inflight_requests") >= 1)
            first.stop(signal.SIGKILL)
            with pytest.raises(errors.TransportError):
                answers[1].result(120)
            with running(**ports):
                assert answers[0].result(250).dq.shape == rows.shape
                assert_right(drawn, patient.backward(**arguments(drawn)))


def test_a_region_that_the_server_lost_is_said_to_be_unknown(drawn: Drawn) -> None:
    with running() as first:
        ports = {name: str(first.address[f"{key}_port"]) for name, key in PORTS.items()}
        client = dqkv.Client(first.target, timeout_s=120)
        region = client.region(1 << 20)
        q = region.tensor((2, 40, 4, 64), "bf16")
        first.stop()
    with running(**ports), client:
        eventually(lambda: health(client) is dqkv.Health.SERVING)
        with pytest.raises(errors.RegionUnknown):
            client.backward(**{**arguments(drawn), "q": q})
        region.close()


def health(client: dqkv.Client) -> dqkv.Health | None:
    try:
        return client.health()
    except errors.TransportError:
        return None


def test_by_unix_socket(tmp_path: Path, drawn: Drawn) -> None:
    path = tmp_path / "dqkv.sock"
    with running(unix_socket=str(path)), Courier(Door(address=f"unix:{path}")) as courier:
        for transport in Transport:
            with courier.load(drawn.problem, transport) as load:
                assert_right(drawn, load.send().gradients)


def test_a_token_is_asked_for_and_taken(drawn: Drawn) -> None:
    with running(tokens="rank:gradient:s3cret") as server:
        for token, kind in ((None, errors.Unauthenticated), ("wrong", errors.Unauthenticated)):
            with dqkv.Client(server.target, token=token) as one, pytest.raises(kind):
                one.backward(**arguments(drawn))
        with Courier(Door(address=server.target, token="s3cret")) as courier:
            for transport in Transport:
                with courier.load(drawn.problem, transport) as load:
                    assert_right(drawn, load.send().gradients)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"), "ours")


def test_by_mutual_tls_every_transport_works_as_one_caller(authority: Authority, drawn: Drawn) -> None:
    host, rank = authority.issue("gradients.test"), authority.issue("rank-0")
    settings = {"tls_cert": str(host.certificate), "tls_key": str(host.key), "tls_client_ca": str(authority.root)}
    tls = dqkv.Tls(root_ca=authority.root, certificate=rank.certificate, key=rank.key, server_name="gradients.test")
    with running(**settings) as server, Courier(Door(address=server.target, tls=tls)) as courier:
        for transport in Transport:
            with courier.load(drawn.problem, transport) as load:
                assert_right(drawn, load.send().gradients)


def test_a_server_of_another_authority_is_not_trusted(authority: Authority, tmp_path: Path, drawn: Drawn) -> None:
    host, stranger = authority.issue("gradients.test"), Authority(tmp_path, "theirs")
    settings = {"tls_cert": str(host.certificate), "tls_key": str(host.key)}
    with running(**settings) as server:
        for tls, hint in (
            (dqkv.Tls(root_ca=stranger.root, server_name="gradients.test"), "do tls.root_ca and tls.server_name fit"),
            (dqkv.Tls(root_ca=authority.root, server_name="other.test"), ""),
            (None, "does the server want TLS?"),
        ):
            retry = dqkv.Retry(attempts=1)
            with (
                dqkv.Client(server.target, tls=tls, retry=retry, timeout_s=120) as one,
                pytest.raises(errors.TransportError) as caught,
            ):
                one.backward(**arguments(drawn))
            assert hint in caught.value.message, caught.value.message


@pytest.mark.parametrize(
    ("port", "tls", "hint"),
    [
        ("http_port", False, "this looks like the HTTP port"),
        ("grpc_port", True, "no TLS is spoken there"),
    ],
)
def test_a_mistyped_port_or_tls_is_guessed_at(
    server: Running, authority: Authority, drawn: Drawn, port: str, tls: bool, hint: str
) -> None:
    trust = dqkv.Tls(root_ca=authority.root) if tls else None
    with (
        dqkv.Client(f"127.0.0.1:{server.address[port]}", tls=trust, retry=dqkv.Retry(attempts=1)) as one,
        pytest.raises(errors.TransportError) as caught,
    ):
        one.backward(**arguments(drawn))
    assert hint in caught.value.message


def test_the_stream_port_names_the_port_that_was_meant(server: Running, drawn: Drawn) -> None:
    with (
        dqkv.Client(server.stream_target, retry=dqkv.Retry(attempts=1)) as one,
        pytest.raises(errors.WrongPort) as caught,
    ):
        one.backward(**arguments(drawn))
    assert str(server.address["grpc_port"]) in caught.value.message
