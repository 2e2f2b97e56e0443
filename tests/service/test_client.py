"""The client against a real server: arrays of every kind, by message and by stream, one or many at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rig.answers import arguments, as_torch, assert_right, drawn_problem, run
from rig.server import Running

import dqkv
from dqkv.problem import FLOAT32_MAX, SOFTCAP_MIN
from dqkv.trials import Drawn

SHM = Path("/dev/shm")


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


# ---- what it says of the server
def test_capabilities_health_and_estimate(client: dqkv.Client, drawn: Drawn) -> None:
    capabilities = client.capabilities()
    assert [device.state for device in capabilities.devices] == ["ok"]
    assert capabilities.devices[0].archs == ("cpu",)
    assert capabilities.notes
    assert client.health() is dqkv.Health.SERVING
    shape = dqkv.Tensor.dense(dqkv.DType.BF16, (1, 64, 2, 32), None)
    estimate = client.estimate(dqkv.Problem(q=shape, k=shape, v=shape, dout=shape, out=shape))
    assert estimate.pairs == 64 * 64 * 2
    assert estimate.arch == "cpu"
    assert (estimate.input_nbytes, estimate.gradient_nbytes) == (5 * 64 * 2 * 32 * 2, 3 * 64 * 2 * 32 * 2)
    assert estimate.device_s > 0


# ---- arrays
@pytest.mark.parametrize("rows", [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("by", ["unary", "stream"])
def test_empty_memory_for_gradients_is_taken(
    client: dqkv.Client, streaming: dqkv.Client, rows: tuple[int, int], by: str
) -> None:
    q, k = (np.ones((3, count, 2, 8), np.float32) for count in rows)
    own = {"dq": np.full_like(q, 7), "dk": np.full_like(k, 7), "dv": np.full_like(k, 7)}
    gradients = (client if by == "unary" else streaming).backward(q, k, k, q, out=q, **own)
    for role, array in own.items():
        assert getattr(gradients, role) is array
        assert not array.any()


@pytest.mark.parametrize("softcap", [SOFTCAP_MIN, 1.0, 1e30, FLOAT32_MAX])
def test_every_softcap_that_is_taken_gives_finite_gradients(client: dqkv.Client, softcap: float) -> None:
    rng = np.random.default_rng(5)
    q, k, v, dout, out = rng.standard_normal((5, 1, 6, 2, 8)).astype(np.float32)
    q[0, 1] = 0.0
    gradients = client.backward(q, k, v, dout, out=out, softcap=softcap)
    for gradient in (gradients.dq, gradients.dk, gradients.dv):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("by", ["unary", "stream"])
def test_results_come_back_as_the_kind_that_came_in(
    client: dqkv.Client, streaming: dqkv.Client, drawn: Drawn, kind: str, by: str
) -> None:
    given = arguments(drawn)
    if kind == "torch":
        given = {role: as_torch(value) if isinstance(value, np.ndarray) else value for role, value in given.items()}
    gradients = (client if by == "unary" else streaming).backward(**given)
    assert_right(drawn, gradients)
    assert type(gradients.dq) is type(given["q"])
    assert gradients.dq.dtype == given["q"].dtype
    assert gradients.dsink is None
    assert gradients.report.device == "cpu:0"
    assert 0 < gradients.report.device_s <= gradients.report.total_s


@pytest.mark.parametrize("by", ["unary", "stream"])
def test_views_give_the_same_gradients_as_copies(
    client: dqkv.Client, streaming: dqkv.Client, drawn: Drawn, by: str
) -> None:
    one = client if by == "unary" else streaming
    given = arguments(drawn)
    want = one.backward(**given)
    q, dout = given["q"], np.ascontiguousarray(given["dout"])
    views = {
        "q": np.repeat(q, 2, -1)[..., ::2],
        "k": np.ascontiguousarray(given["k"].swapaxes(1, 2)).swapaxes(1, 2),
        "v": np.concatenate([given["v"], given["v"]], -1)[..., :64],
        "dout": np.ascontiguousarray(dout[::-1, :, ::-1])[::-1, :, ::-1],
    }
    got = one.backward(**{**given, **views})
    for role in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(got, role), getattr(want, role))


def test_an_expanded_gradient_of_a_sum_is_read_right(client: dqkv.Client, streaming: dqkv.Client) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 40, 2, 32, generator=generator) for _ in range(3))
    ones = torch.ones(()).expand(q.shape)
    answers = [
        one.backward(q, k, v, dout, delta=torch.zeros(1, 2, 40))
        for one in (client, streaming)
        for dout in (ones, ones.contiguous())
    ]
    for answer in answers[1:]:
        assert torch.equal(answer.dv, answers[0].dv)
    assert torch.allclose(answers[0].dv.sum(1), torch.full((1, 2, 32), 40.0), rtol=1e-4)


def test_an_expanded_tensor_is_streamed_without_being_built(server: Running) -> None:
    # 1 GiB of dout over one element; what the client holds meanwhile must not grow by it.
    rows, heads, width = 1 << 16, 32, 128
    program = f"""
import resource, sys
import numpy as np
import dqkv
import ml_dtypes
zero = np.zeros((), ml_dtypes.bfloat16)
big = np.broadcast_to(zero, ({rows}, {heads}, {width}))
problem = dict(delta=np.broadcast_to(np.float32(0), ({heads}, {rows})), cu_seqlens_q=[0, 1], cu_seqlens_k=[0, 1])
k = np.broadcast_to(zero, (8, 1, {width}))
with dqkv.Client(sys.argv[1], timeout_s=120) as client:
    client.health()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dq = np.zeros(0)
    answer = client.backward(big, k, k, big, **problem)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert not answer.dq.any()
# The answer itself is half a GiB, and came here.
print(grown >> 10)
"""
    done = run(program, server.target)
    assert int(done) < 512 + 128


@pytest.mark.parametrize("by", ["unary", "stream"])
def test_gradients_land_in_the_callers_memory(
    client: dqkv.Client, streaming: dqkv.Client, drawn: Drawn, by: str
) -> None:
    given = arguments(drawn)
    nan = np.float32("nan")
    dq = np.full(given["q"].shape, nan, given["q"].dtype)
    dk = np.full((*given["k"].shape[:-1], 96), nan, given["k"].dtype)
    dv = as_torch(np.full(given["v"].shape, nan, given["v"].dtype))
    gradients = (client if by == "unary" else streaming).backward(**given, dq=dq, dk=dk[..., 32:], dv=dv)
    assert gradients.dq is dq
    assert gradients.dv is dv
    assert np.isnan(dk[..., :32]).all()
    assert_right(drawn, gradients)


def test_fp32_gradients_of_bf16_inputs(client: dqkv.Client, drawn: Drawn) -> None:
    given = arguments(drawn)
    for dtype in ("fp32", np.float32, torch.float32):
        assert client.backward(**given, grad_dtype=dtype).dq.dtype == np.float32


def test_torch_is_not_imported_for_numpy_arrays(server: Running) -> None:
    program = """
import sys
import numpy as np
import dqkv
q = np.ones((1, 8, 2, 16), np.float16)
with dqkv.Client(sys.argv[1]) as client:
    client.backward(q, q, q, q, out=q)
    with client.region(4096, kind="posix") as region:
        client.backward(region.tensor(q.shape, "fp16"), q, q, q, out=q)
print([name for name in ("torch", "fastapi", "pydantic", "multiprocessing.resource_tracker") if name in sys.modules])
"""
    assert run(program, server.target) == "[]\n"


# ---- many at once
def test_threads_share_one_client(client: dqkv.Client, drawn: Drawn) -> None:
    given = arguments(drawn)
    answers: list[dqkv.Gradients[Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(client.backward(**given))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    for answer in answers:
        assert np.array_equal(answer.dq, answers[0].dq)


async def test_many_requests_of_an_async_client_run_together(server: Running, drawn: Drawn) -> None:
    given = arguments(drawn)
    async with dqkv.AsyncClient(server.target, inline_nbytes=-1) as one:
        answers = await asyncio.gather(*(one.backward(**given) for _ in range(6)))
    for answer in answers:
        assert_right(drawn, answer)


@pytest.mark.parametrize("spelled", ["async with", "await", "async with await"])
async def test_a_region_of_an_async_client_is_awaited_or_entered(server: Running, spelled: str) -> None:
    async with dqkv.AsyncClient(server.target) as one:
        before = server.metric("dqkv_regions")
        opening = one.region(1 << 16, kind="posix")
        if spelled == "async with":
            async with opening as region:
                assert server.metric("dqkv_regions") == before + 1
                first, second = region.tensor((4,), "fp32"), region.torch((4,), "fp32")
                first[...] = 1.0
                assert not second.any()
        elif spelled == "await":
            region = await opening
            await region.close()
        else:
            async with await opening as region:
                assert region.nbytes == 1 << 16
        assert server.metric("dqkv_regions") == before
        with pytest.raises(dqkv.errors.RegionInvalid, match=r"^this region is closed$"):
            region.tensor((1,), "fp32")


async def test_a_region_that_cannot_be_had_is_refused_either_way(server: Running) -> None:
    async with dqkv.AsyncClient(server.target) as one:
        with pytest.raises(dqkv.errors.RegionInvalid, match="the limit is"):
            await one.region(1 << 60)
        with pytest.raises(dqkv.errors.RegionInvalid, match="the limit is"):
            async with one.region(1 << 60):
                pytest.fail("it was opened")
