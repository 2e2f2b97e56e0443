"""Arrays of a client's pool, with a real server: shared while they live, lent again afterwards, never by two."""

from __future__ import annotations

import gc
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from rig.answers import arguments, as_torch, assert_right, drawn_problem
from rig.process import wait_for
from rig.server import Running, eventually, running

import dqkv
from dqkv import errors
from dqkv.client.capabilities import Health
from dqkv.client.pool import REGION_NBYTES
from dqkv.trials import Drawn

INPUTS = ("q", "k", "v", "dout", "out", "softmax_lse")


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return drawn_problem()


@pytest.fixture
def client(server: Running) -> Iterator[dqkv.Client]:
    with dqkv.Client(server.target, timeout_s=120) as one:
        yield one


def pooled(client: dqkv.Client, drawn: Drawn, roles: tuple[str, ...] = INPUTS) -> dict[str, Any]:
    """The problem's arguments, those of these roles in memory of the pool."""
    given = arguments(drawn)
    for role in roles:
        array = client.allocate(given[role].shape, given[role].dtype)
        array[...] = given[role]
        given[role] = array
    return given


def moved(server: Running) -> float:
    """Bytes of tensors that went over gRPC."""
    return sum(server.metric("dqkv_bytes_total", transport=each) for each in ("unary", "stream"))


def reaches(client: dqkv.Client) -> bool:
    try:
        return client.health() is Health.SERVING
    except errors.TransportError:
        return False


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_what_lies_in_the_pool_is_read_and_answered_there(server: Running, client: dqkv.Client, drawn: Drawn) -> None:
    given = pooled(client, drawn)
    before = moved(server)
    gradients = client.backward(**given)
    assert moved(server) == before
    assert_right(drawn, gradients)
    assert client._client._regions.find(gradients.dq) is not None


def test_torch_tensors_of_the_pool_take_part_in_autograd(client: dqkv.Client, drawn: Drawn) -> None:
    given = arguments(drawn)
    q, k, v = (client.allocate(given[role].shape, torch.bfloat16) for role in ("q", "k", "v"))
    for role, tensor in (("q", q), ("k", k), ("v", v)):
        tensor.copy_(as_torch(given[role]))
        tensor.requires_grad_()
    out = dqkv.attention(q, k, v, client=client, causal=True)
    out.backward(as_torch(given["dout"]))
    want = client.backward(**given)
    for tensor, gradient in ((q, want.dq), (k, want.dk), (v, want.dv)):
        assert torch.allclose(tensor.grad.float(), as_torch(gradient).float(), atol=0.02, rtol=0.02)


def test_a_training_loop_takes_the_same_memory_each_step(server: Running, client: dqkv.Client, drawn: Drawn) -> None:
    before = server.metric("dqkv_regions")
    seen = set()
    for _ in range(20):
        given = pooled(client, drawn)
        gradients = client.backward(**given)
        seen.add((address(given["q"]), address(gradients.dq)))
        del given, gradients
        gc.collect()
    assert len(seen) == 1
    assert server.metric("dqkv_regions") == before + 1


def test_memory_is_not_lent_again_while_a_view_of_a_view_sees_it(client: dqkv.Client) -> None:
    whole = client.allocate((64, 64), "fp32")
    whole[...] = 7.0
    first = address(whole)
    view = torch.from_numpy(whole[1:].T[::2])[3]
    del whole
    gc.collect()
    others = [client.allocate((64, 64), "fp32") for _ in range(8)]
    for other in others:
        other[...] = 0.0
    assert first not in map(address, others)
    assert bool((view == 7.0).all())
    del view
    gc.collect()
    assert address(client.allocate((64, 64), "fp32")) == first


def test_arrays_never_share_bytes_in_whatever_order_they_come_and_go(client: dqkv.Client) -> None:
    def work(seed: int) -> None:
        chance = random.Random(seed)
        held: list[tuple[int, np.ndarray]] = []
        for number in range(400):
            if held and chance.random() < 0.45:
                mark, array = held.pop(chance.randrange(len(held)))
                wrong.extend([number] if not (array == mark).all() else [])
                del array
            else:
                mark = seed * 1000 + number
                array = client.allocate((chance.randrange(1, 5000),), np.float32)
                array[...] = mark
                held.append((mark, array))
        wrong.extend(mark for mark, array in held if not (array == mark).all())

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    gc.collect()
    # all of it came back, in one piece: so much fits into the regions that there are
    whole = client.allocate((REGION_NBYTES,), np.float16)
    del whole


def test_what_does_not_fit_a_region_of_the_pool_gets_one_of_its_own(server: Running, client: dqkv.Client) -> None:
    before = server.metric("dqkv_regions")
    small, large = client.allocate((8,), "fp16"), client.allocate((REGION_NBYTES // 2 + 1,), "fp16")
    assert server.metric("dqkv_regions") == before + 2
    assert (small.dtype, large.nbytes) == (np.float16, REGION_NBYTES + 2)
    client.close()
    small[...], large[-1] = 1.0, 2.0  # ordinary memory now
    eventually(lambda: server.metric("dqkv_regions") == before)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("bf16", ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (np.dtype("float16"), np.float16),
        (np.float32, np.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
def test_the_dtype_says_what_kind_of_array_it_is(client: dqkv.Client, dtype: Any, kind: Any) -> None:
    for shape in ((3, 5, 2), (4, 0, 2), (1,)):
        array = client.allocate(shape, dtype)
        assert tuple(array.shape) == shape
        assert array.dtype == kind
        assert isinstance(array, torch.Tensor) == isinstance(dtype, torch.dtype)


def test_what_cannot_be_allocated_is_refused_and_loses_nothing(server: Running, client: dqkv.Client) -> None:
    kept = client.allocate((16,), "fp32")
    kept[...] = 3.0
    before = server.metric("dqkv_regions")
    with pytest.raises(errors.DTypeMismatch, match="float64"):
        client.allocate((16,), np.float64)
    with pytest.raises(errors.SizeOverflow, match="-1"):
        client.allocate((-1, 4), "fp32")
    with pytest.raises(errors.RegionInvalid, match="nbytes"):
        client.allocate((1 << 40,), "fp32")
    assert server.metric("dqkv_regions") == before
    assert (kept == 3.0).all()


def test_inputs_outside_the_pool_are_answered_outside_it(client: dqkv.Client, drawn: Drawn) -> None:
    client.allocate((8,), "fp32")
    gradients = client.backward(**pooled(client, drawn, ("q", "k", "v")))
    assert_right(drawn, gradients)
    assert client._client._regions.find(gradients.dq) is None


def test_memory_that_the_caller_gives_goes_before_the_pools(client: dqkv.Client, drawn: Drawn) -> None:
    given = pooled(client, drawn)
    own = np.full(given["q"].shape, np.nan, given["q"].dtype)
    gradients = client.backward(**given, dq=own)
    assert gradients.dq is own
    assert_right(drawn, gradients)
    assert client._client._regions.find(gradients.dk) is not None


def test_after_a_restart_lost_memory_is_ordinary_and_the_pool_goes_on(drawn: Drawn) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with running(port=port) as first, dqkv.Client(f"127.0.0.1:{port}", timeout_s=120) as client:
        given = pooled(client, drawn)
        assert_right(drawn, client.backward(**given))
        assert first.stop() == 0
        with running(port=port) as second:
            wait_for(lambda: reaches(client), "the client's connection comes back by itself")
            gradients = client.backward(**given)
            assert_right(drawn, gradients)
            assert client._client._regions.find(given["q"]) is None
            fresh = client.backward(**pooled(client, drawn))
            assert_right(drawn, fresh)
            assert client._client._regions.find(fresh.dq) is not None
            assert second.metric("dqkv_regions") == 1


async def test_the_async_client_allocates_too(server: Running, drawn: Drawn) -> None:
    async with dqkv.AsyncClient(server.target, timeout_s=120) as client:
        given = arguments(drawn)
        for role in INPUTS:
            array = await client.allocate(given[role].shape, given[role].dtype)
            array[...] = given[role]
            given[role] = array
        assert_right(drawn, await client.backward(**given))
