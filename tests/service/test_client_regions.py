"""Shared memory between a client and a real server: what moves, what is left behind, whose it is."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from rig.answers import arguments, assert_right, drawn_problem, run
from rig.memory import segment_names
from rig.process import wait_for
from rig.proxy import ADDRESS, Direction, TamperingProxy
from rig.server import Running, eventually

import dqkv
from dqkv import errors
from dqkv.trials import Drawn


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


def moved(server: Running) -> float:
    return server.metric("dqkv_bytes_total", transport="unary") + server.metric("dqkv_bytes_total", transport="stream")


@pytest.mark.parametrize("kind", ["memfd", "posix"])
def test_by_region_no_tensor_byte_goes_over_grpc(server: Running, client: dqkv.Client, drawn: Drawn, kind: str) -> None:
    given, names = arguments(drawn), segment_names()
    with client.region(1 << 20, kind=kind, label="all") as region:
        wait_for(lambda: segment_names() <= names, "its memory has no name; others of this machine come and go")
        views, offset = {}, 0
        for role in ("q", "k", "v", "dout", "out", "softmax_lse"):
            array = given[role]
            views[role] = region.tensor(array.shape, array.dtype, byte_offset=offset)
            views[role][...] = array
            offset += -(-array.nbytes // 64) * 64
        outputs = {}
        for role, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
            outputs[role] = region.torch(given[like].shape, "bf16", byte_offset=offset)
            outputs[role].fill_(float("nan"))
            offset += -(-given[like].nbytes // 64) * 64
        before = moved(server)
        gradients = client.backward(**{**given, **views}, **outputs)
        assert moved(server) == before
        assert gradients.dq is outputs["dq"]
        assert_right(drawn, gradients)


def test_tensors_made_one_after_the_other_share_nothing(client: dqkv.Client, drawn: Drawn) -> None:
    given = arguments(drawn)
    with client.region(1 << 20, label="ring") as region:
        views = {role: region.tensor(given[role].shape, given[role].dtype) for role in ("q", "k", "v", "dout", "out")}
        outputs = {
            role: region.torch(given[like].shape, "bf16") for role, like in (("dq", "q"), ("dk", "k"), ("dv", "v"))
        }
        for role, view in views.items():
            view[...] = given[role]
        assert_right(drawn, client.backward(**{**given, **views}, **outputs))
        with pytest.raises(errors.RegionInvalid, match="needs 1048576 bytes, the region has"):
            region.tensor((1 << 18,), "fp32")
    with pytest.raises(errors.RegionInvalid, match=r"^region 'ring' is closed$"):
        region.torch((1,), "bf16")


@pytest.mark.parametrize("kind", ["memfd", "posix"])
@pytest.mark.parametrize("nbytes", [1 << 40, 1 << 60, 0, -1])
def test_a_region_larger_than_memory_is_refused_and_nothing_is_registered(
    server: Running, client: dqkv.Client, kind: str, nbytes: int
) -> None:
    before = server.metric("dqkv_regions")
    with pytest.raises(errors.RegionInvalid, match=f"nbytes is {nbytes}"):
        client.region(nbytes, kind=kind)
    assert server.metric("dqkv_regions") == before


def test_a_region_tensor_keeps_its_strides(client: dqkv.Client, drawn: Drawn) -> None:
    given = arguments(drawn)
    with client.region(1 << 20) as region:
        batch, rows, heads, width = given["q"].shape
        # Rows of one wide projection, heads first in memory, and a neighbour's columns that must stay as they are.
        wide = region.tensor((batch, rows, 3 * heads * width), "bf16")
        wide[...] = 7.0
        q = wide[..., : heads * width].reshape(batch, rows, heads, width)
        assert np.shares_memory(q, wide)
        q[...] = given["q"]
        dq = wide[..., heads * width : 2 * heads * width].reshape(batch, rows, heads, width)
        gradients = client.backward(**{**given, "q": q}, dq=dq)
        assert_right(drawn, gradients)
        assert (wide[..., 2 * heads * width :] == 7.0).all()


def test_one_request_may_mix_regions_and_bytes(client: dqkv.Client, streaming: dqkv.Client, drawn: Drawn) -> None:
    given = arguments(drawn)
    for one in (client, streaming):
        with one.region(1 << 19) as first, one.region(1 << 19, kind="posix") as second:
            k = first.tensor(given["k"].shape, "bf16")
            k[...] = given["k"]
            dv = second.tensor(given["v"].shape, "bf16")
            gradients = one.backward(**{**given, "k": k}, dv=dv)
            assert gradients.dv is dv
            assert_right(drawn, gradients)


def test_views_outlive_a_closed_region_as_ordinary_memory(client: dqkv.Client, drawn: Drawn) -> None:
    given = arguments(drawn)
    region = client.region(1 << 20)
    q = region.tensor(given["q"].shape, "bf16")
    q[...] = given["q"]
    region.close()
    region.close()
    with pytest.raises(errors.RegionInvalid, match=r"^this region is closed$"):
        region.tensor((1,), "bf16")
    assert_right(drawn, client.backward(**{**given, "q": q}))


def test_a_region_lives_on_between_uses_and_ends_when_closed(server: Running) -> None:
    """The client renews it; only on a machine that stands still for longer than a lease does it need a longer one."""
    with dqkv.Client(server.target) as one:
        for lease_s in (0.6, 3.0, 15.0):
            region = one.region(4096, lease_s=lease_s)
            q = region.tensor((1, 8, 2, 16), "fp16")
            before = server.metric("dqkv_regions")
            time.sleep(2.5 * lease_s)
            try:
                one.backward(q, q, q, q, out=q)
            except errors.RegionLeaseExpired:
                continue
            region.close()
            assert server.metric("dqkv_regions") == before - 1
            return
        pytest.fail("no lease was renewed")


def test_a_region_survives_a_connection_that_breaks(server: Running, drawn: Drawn) -> None:
    given = arguments(drawn)
    port = server.address["grpc_port"]

    def wire() -> TamperingProxy:
        return TamperingProxy([port], mark=b"never sent, never changed", direction=Direction.UP)

    retry = dqkv.Retry(attempts=500, first_s=0.05, limit_s=0.2)
    with dqkv.Client(f"{ADDRESS}:{port}", timeout_s=120, retry=retry) as one:
        with wire():
            region = one.region(1 << 20)
            q = region.tensor(given["q"].shape, "bf16")
            q[...] = given["q"]
            assert_right(drawn, one.backward(**{**given, "q": q}))
        with ThreadPoolExecutor(1) as pool:
            # It is asked while nothing can be reached, so that the client itself sees the break.
            asked = pool.submit(one.backward, **{**given, "q": q})
            time.sleep(0.3)
            with wire():
                assert_right(drawn, asked.result(120))
                region.close()


def test_a_client_that_is_killed_leaves_no_name_and_no_region(server: Running, client: dqkv.Client) -> None:
    before, names = server.metric("dqkv_regions"), segment_names()
    program = """
import os, sys
import dqkv
client = dqkv.Client(sys.argv[1])
client.region(4096, kind="posix", lease_s=0.5)
client.region(4096, kind="memfd", lease_s=0.5)
print("open", flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program, server.target], capture_output=True, text=True, timeout=120)
    assert done.stdout == "open\n"
    wait_for(lambda: segment_names() <= names, "no name is left; others of this machine come and go")
    eventually(lambda: server.metric("dqkv_regions") <= before)


def test_a_process_that_ends_with_open_regions_ends_quietly(server: Running) -> None:
    program = """
import sys
import dqkv
client = dqkv.Client(sys.argv[1])
region = client.region(4096, kind="posix")
view = region.tensor((16,), "fp32")
other = client.region(4096)
"""
    names = segment_names()
    assert run(program, server.target) == ""
    wait_for(lambda: segment_names() <= names, "no name is left; others of this machine come and go")


def test_outputs_in_a_region_may_not_lie_on_inputs(client: dqkv.Client) -> None:
    with client.region(1 << 16) as region:
        q = region.tensor((1, 8, 2, 16), "fp16")
        with pytest.raises(errors.RegionOverlap):
            client.backward(q, q, q, q, out=q, dq=q)


def test_a_region_needs_a_known_kind(client: dqkv.Client) -> None:
    with pytest.raises(errors.OptionInvalid):
        client.region(4096, kind="file")


def test_two_clients_of_one_process_are_two_callers(server: Running) -> None:
    with dqkv.Client(server.target) as one, dqkv.Client(server.target) as other:
        q = one.region(4096, kind="posix").tensor((1, 8, 2, 16), "fp16")
        # The other client is told what the first one's region is, and refers to it.
        other._client._regions._open = one._client._regions._open
        with pytest.raises(errors.RegionUnknown):
            other.backward(q, q, q, q, out=q)
        other._client._regions._open = ()
