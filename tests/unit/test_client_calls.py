"""Calls against a scripted server on a real socket: what is sent again, what an answer must be, what is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_status import rpc_status

import dqkv
from dqkv import codec, errors, framing
from dqkv.client.endpoint import Endpoint
from dqkv.client.hints import Contact, hinted
from dqkv.client.retry import SAFE_REASONS, Retry
from dqkv.client.waiting import THREADS, OnLoop
from dqkv.framing import Part, Receiver, Sender
from dqkv.v1 import gradient_pb2 as pb
from dqkv.v1 import gradient_pb2_grpc as stubs

pytestmark = pytest.mark.numpy_only

FAST = Retry(first_s=0.001, limit_s=0.01)
Q = np.arange(2 * 8 * 2 * 16, dtype=np.float32).reshape(2, 8, 2, 16).astype(np.float16)
DELTA = np.zeros((2, 2, 8), np.float32)
PATIENCE_S = 60.0
"""More than any time that a client is given here, less than a server is silent."""


@dataclass
class Script(stubs.AttentionGradientServiceServicer, stubs.CapabilityServiceServicer, stubs.RegionServiceServicer):
    """Answers with the next step of `steps`, the last again and again; `seen` counts what came."""

    steps: list[Callable[[pb.BackwardRequest], pb.BackwardResponse]] = field(default_factory=list)
    seen: list[pb.BackwardRequest] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def GetCapabilities(self, request: Any, context: grpc.ServicerContext) -> pb.GetCapabilitiesResponse:
        limits = pb.Limits(message_bytes=1 << 26, inline_bytes=1 << 22, request_bytes=1 << 30)
        return pb.GetCapabilitiesResponse(limits=limits, session=f"session-{len(self.seen)}")

    def Backward(self, request: pb.BackwardRequest, context: grpc.ServicerContext) -> pb.BackwardResponse:
        self.seen.append(request)
        self.arrived.set()
        self.sessions.append(dict(context.invocation_metadata()).get("dqkv-session", ""))
        context.add_callback(self.cancelled.set)
        try:
            return self.steps[min(len(self.seen), len(self.steps)) - 1](request)
        except errors.DqkvError as error:
            context.abort_with_status(rpc_status.to_status(codec.encode_error(error)))

    def BackwardStream(self, frames: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        yield from self.stream(frames)

    stream: Callable[[Iterator[Any]], Iterator[Any]] = field(default=iter)


@contextlib.contextmanager
def serving(script: Script) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8))
    stubs.add_AttentionGradientServiceServicer_to_server(script, server)
    stubs.add_CapabilityServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def answer(request: pb.BackwardRequest, **changes: Any) -> pb.BackwardResponse:
    """Gradients that are the inputs themselves."""
    inputs = {tensor.role: tensor for tensor in request.problem.tensors}
    gradients = []
    for role, source in ((pb.TENSOR_ROLE_DQ, 1), (pb.TENSOR_ROLE_DK, 2), (pb.TENSOR_ROLE_DV, 3)):
        message = pb.Tensor(role=role, dtype=inputs[source].dtype, shape=inputs[source].shape)
        message.data = inputs[source].data
        gradients.append(message)
    response = pb.BackwardResponse(gradients=gradients, report=pb.Report(kernel="script"))
    for name, value in changes.items():
        setattr(response, name, value)
    return response


def failing(error: errors.DqkvError) -> Callable[[pb.BackwardRequest], pb.BackwardResponse]:
    def step(_: pb.BackwardRequest) -> pb.BackwardResponse:
        raise error

    return step


def ask(address: str, **given: Any) -> dqkv.Gradients[Any]:
    with dqkv.Client(address, retry=FAST, timeout_s=120) as client:
        return client.backward(Q, Q + 1, Q + 2, Q, delta=DELTA, **given)


def ask_by_stream(address: str) -> None:
    with dqkv.Client(address, inline_nbytes=-1, timeout_s=120) as client:
        client.backward(Q, Q, Q, Q, delta=DELTA)


# ---- retries
@pytest.mark.parametrize(
    "error",
    [
        errors.Draining("a"),
        errors.QueueFull("b", retry_after_s=0.01),
        errors.QuotaBytes("c"),
        errors.DeviceLost("d"),
        errors.QuotaStreams("e", retry_after_s=0.01),
        errors.KernelBuilding("f", retry_after_s=0.01),
    ],
)
def test_what_left_nothing_behind_is_sent_again(error: errors.DqkvError) -> None:
    script = Script([failing(error), failing(error), answer])
    with serving(script) as address:
        gradients = ask(address)
    assert len(script.seen) == 3
    assert {request.request_id for request in script.seen} == {script.seen[0].request_id}
    assert np.array_equal(gradients.dq, Q)
    assert script.sessions == ["session-0", "session-1", "session-2"], "a retry asks who it is talking to again"


@pytest.mark.parametrize(
    "error",
    [
        errors.Cancelled("a"),
        errors.ShapeMismatch("b", field="q"),
        errors.WontFinish("c"),
        errors.TooLarge("d"),
        errors.RegionBusy("e"),
        errors.DeviceOutOfMemory("f"),
        errors.InternalFault("g"),
        errors.Unauthenticated("h"),
    ],
)
def test_nothing_else_is_sent_again(error: errors.DqkvError) -> None:
    script = Script([failing(error)])
    with serving(script) as address, pytest.raises(type(error)) as caught:
        ask(address)
    assert len(script.seen) == 1
    assert (caught.value.reason, caught.value.field, caught.value.message) == (error.reason, error.field, error.message)


RETRYABLE_BUT_NOT_SAFE = {
    errors.TransportError.reason: "safe only where no region is written: Retry.wait_s decides",
    errors.QuotaRegions.reason: "waiting frees none: the caller has to close a region first",
    errors.DeviceOutOfMemory.reason: "the same request would most likely run out again",
}


def test_what_is_sent_again_agrees_with_what_the_errors_say_of_themselves() -> None:
    retryable = {reason for reason, kind in errors.table().items() if kind.status.retryable}
    assert set(SAFE_REASONS) <= retryable
    assert retryable - set(SAFE_REASONS) == set(RETRYABLE_BUT_NOT_SAFE)
    assert not set(SAFE_REASONS) & set(RETRYABLE_BUT_NOT_SAFE)


def test_attempts_are_bounded() -> None:
    script = Script([failing(errors.Draining("still"))])
    with serving(script) as address, pytest.raises(errors.Draining):
        ask(address)
    assert len(script.seen) == FAST.attempts


def test_a_wait_past_the_deadline_is_not_begun() -> None:
    script = Script([failing(errors.QueueFull("full", retry_after_s=6000.0))])
    began = time.monotonic()
    with serving(script) as address, pytest.raises(errors.QueueFull) as caught:
        ask(address, timeout_s=200)
    assert time.monotonic() - began < 100, "it waits for neither"
    assert caught.value.retry_after_s == 6000.0
    assert len(script.seen) == 1


def test_a_connection_that_broke_is_tried_again_unless_a_region_is_written() -> None:
    retry = Retry(attempts=3, first_s=1.0, limit_s=8.0)
    broken = errors.TransportError("gone")
    first, second = (retry.wait_s(number, broken, writes_region=False) for number in (1, 2))
    assert first is not None
    assert second is not None
    assert 0.5 <= first <= 1.0 <= second <= 2.0
    assert retry.wait_s(1, broken, writes_region=True) is None
    assert retry.wait_s(3, broken, writes_region=False) is None
    assert retry.wait_s(1, errors.DeviceLost("x"), writes_region=True) is not None


def test_nobody_listens() -> None:
    with dqkv.Client("127.0.0.1:1", retry=FAST, timeout_s=5) as client, pytest.raises(errors.TransportError):
        client.backward(Q, Q, Q, Q, delta=DELTA)


def test_a_wrong_request_is_refused_before_anything_is_sent() -> None:
    script = Script([answer])
    with serving(script) as address, pytest.raises(errors.OutOrDelta):
        ask(address, out=Q)
    assert not script.seen


# ---- answers
def test_bytes_arrive_in_the_callers_memory() -> None:
    dq, dk = np.empty_like(Q), np.empty((2, 8, 2, 32), np.float16)[..., 16:]
    with serving(Script([answer])) as address:
        gradients = ask(address, dq=dq, dk=dk)
    assert gradients.dq is dq
    assert gradients.dk is dk
    assert np.array_equal(dq, Q)
    assert np.array_equal(dk, Q + 1)
    assert gradients.report.kernel == "script"


def test_an_answer_with_other_bytes_than_its_checksum_is_refused() -> None:
    with (
        serving(Script([lambda request: answer(request, checksum=1)])) as address,
        pytest.raises(errors.ChecksumMismatch),
    ):
        ask(address)


@pytest.mark.parametrize("break_it", ["missing", "shape", "dtype", "twice"])
def test_an_answer_to_another_question_is_refused(break_it: str) -> None:
    def step(request: pb.BackwardRequest) -> pb.BackwardResponse:
        response = answer(request)
        match break_it:
            case "missing":
                del response.gradients[1]
            case "shape":
                response.gradients[1].shape[:] = [8, 2, 2, 16]
            case "dtype":
                response.gradients[1].dtype = pb.DATA_TYPE_BF16
            case "twice":
                response.gradients[1].role = pb.TENSOR_ROLE_DQ
        return response

    with serving(Script([step])) as address, pytest.raises(errors.MessageInvalid):
        ask(address)


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ([], errors.Truncated),
        ([pb.BackwardStreamResponse(trailer=pb.Trailer())], errors.MessageInvalid),
        ([pb.BackwardStreamResponse(data=b"x")], errors.MessageInvalid),
        ([pb.BackwardStreamResponse(header=pb.BackwardStreamResponse.Header())], errors.MessageInvalid),
    ],
)
def test_a_stream_that_is_no_answer_is_refused(frames: list[pb.BackwardStreamResponse], kind: type[Exception]) -> None:
    script = Script(stream=lambda _: iter(frames))
    with serving(script) as address, pytest.raises(kind):
        ask_by_stream(address)


def test_a_stream_cut_before_its_trailer_is_refused_though_all_bytes_came() -> None:
    def stream(requests: Iterator[Any]) -> Iterator[pb.BackwardStreamResponse]:
        for _ in requests:
            pass
        header = pb.BackwardStreamResponse.Header(total_bytes=3 * Q.nbytes)
        for role in (pb.TENSOR_ROLE_DQ, pb.TENSOR_ROLE_DK, pb.TENSOR_ROLE_DV):
            message = header.gradients.add(role=role, dtype=pb.DATA_TYPE_FP16, shape=Q.shape)
            message.stream.SetInParent()
        yield pb.BackwardStreamResponse(header=header)
        for _ in range(3):
            yield pb.BackwardStreamResponse(data=Q.tobytes())

    with serving(Script(stream=stream)) as address, pytest.raises(errors.Truncated):
        ask_by_stream(address)


# ---- cancellation and deadlines
def slow(release: threading.Event) -> Callable[[pb.BackwardRequest], pb.BackwardResponse]:
    def step(request: pb.BackwardRequest) -> pb.BackwardResponse:
        release.wait(2 * PATIENCE_S)
        return answer(request)

    return step


async def test_cancelling_a_task_cancels_its_unary_call() -> None:
    release = threading.Event()
    script = Script([slow(release)])
    with serving(script) as address:
        async with dqkv.AsyncClient(address) as client:
            task = asyncio.create_task(client.backward(Q, Q, Q, Q, delta=DELTA))
            assert await asyncio.to_thread(script.arrived.wait, 120)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(script.cancelled.wait, 120)
        release.set()


async def test_cancelling_a_task_ends_its_stream_before_it_raises() -> None:
    started, ended = threading.Event(), threading.Event()

    def stream(requests: Iterator[Any]) -> Iterator[Any]:
        started.set()
        try:
            for _ in requests:
                pass
            ended.wait(120)
        finally:
            ended.set()
        yield pb.BackwardStreamResponse()

    with serving(Script(stream=stream)) as address:
        async with dqkv.AsyncClient(address, inline_nbytes=-1) as client:
            task = asyncio.create_task(client.backward(Q, Q, Q, Q, delta=DELTA))
            assert await asyncio.to_thread(started.wait, 120)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 120)
        ended.set()


@dataclass
class Streaming:
    """A stream that is held until `release`; counts those begun and ended."""

    release: threading.Event = field(default_factory=threading.Event)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __call__(self, requests: Iterator[Any]) -> Iterator[Any]:
        for _ in requests:
            pass
        self.begun.release()
        self.release.wait(2 * PATIENCE_S)
        yield pb.BackwardStreamResponse()


@pytest.mark.parametrize("cancels", [1, 2, 5])
async def test_a_cancelled_stream_has_ended_when_it_raises_and_leaves_no_error_that_nobody_looked_at(
    cancels: int,
) -> None:
    unseen: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    stream = Streaming()
    with serving(Script(stream=stream)) as address:
        async with dqkv.AsyncClient(address, inline_nbytes=-1) as client:
            for _ in range(3):
                task = asyncio.create_task(client.backward(Q, Q, Q, Q, delta=DELTA))
                assert await asyncio.to_thread(stream.begun.acquire, timeout=120)
                for _ in range(cancels):
                    task.cancel()
                    await asyncio.sleep(0)
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(task, 120)
                del task
        stream.release.set()
    gc.collect()
    await asyncio.sleep(0)
    assert not unseen


async def test_however_often_a_task_is_cancelled_its_work_has_ended_before_it_raises() -> None:
    waiting, release, ended = OnLoop(), threading.Event(), threading.Event()

    def run() -> None:
        release.wait(2 * PATIENCE_S)
        ended.set()
        raise errors.Cancelled("late")

    task = asyncio.create_task(waiting.work(run, lambda: None))
    for _ in range(5):
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    await waiting.close()


async def test_cancelling_what_no_thread_has_begun_waits_for_no_thread() -> None:
    waiting, release, ran = OnLoop(), threading.Event(), threading.Event()
    busy = [
        asyncio.create_task(waiting.work(lambda: release.wait(2 * PATIENCE_S), release.set)) for _ in range(THREADS)
    ]
    await asyncio.sleep(0.05)
    queued = asyncio.create_task(waiting.work(ran.set, lambda: None))
    await asyncio.sleep(0.05)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(queued), 60)
    assert not release.is_set()
    release.set()
    assert await asyncio.gather(*busy) == [True] * THREADS
    assert not ran.is_set()
    await waiting.close()


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e300, 1e18, 2**63, np.float32(1e30), 10**300])
@pytest.mark.parametrize("inline_nbytes", [None, -1], ids=["unary", "stream"])
def test_a_time_without_end_is_as_long_as_it_takes(timeout_s: Any, inline_nbytes: int | None) -> None:
    def stream(requests: Iterator[Any]) -> Iterator[Any]:
        for _ in requests:
            pass
        yield from ()

    with (
        serving(Script([answer], stream=stream)) as address,
        dqkv.Client(address, timeout_s=timeout_s, inline_nbytes=inline_nbytes) as patient,
        dqkv.Client(address, inline_nbytes=inline_nbytes) as other,
    ):
        assert patient.capabilities().limits.inline_nbytes == 1 << 22
        for client, given in ((patient, {}), (patient, {"timeout_s": timeout_s}), (other, {"timeout_s": timeout_s})):
            if inline_nbytes is None:
                assert np.array_equal(client.backward(Q, Q, Q, Q, delta=DELTA, **given).dq, Q)
            else:
                with pytest.raises(errors.Truncated):
                    client.backward(Q, Q, Q, Q, delta=DELTA, **given)


@pytest.mark.parametrize(
    "timeout_s",
    [float("nan"), -1, -1e-300, float("-inf"), -(2**80), 10**400, pytest.param(10**5000, id="huge"), "1", True],
)
def test_a_time_that_is_none_is_refused_before_anything_is_sent(timeout_s: Any) -> None:
    script = Script([answer])
    with serving(script) as address:
        for kind in (dqkv.Client, dqkv.AsyncClient):
            with pytest.raises(errors.OptionInvalid) as caught:
                kind(address, timeout_s=timeout_s)
            assert caught.value.field == "timeout_s"
        with dqkv.Client(address) as client, pytest.raises(errors.OptionInvalid, match="timeout_s"):
            client.backward(Q, Q, Q, Q, delta=DELTA, timeout_s=timeout_s)
    assert not script.seen


ASKING: dict[str, Callable[[dqkv.Client], Any]] = {
    "backward": lambda client: client.backward(Q, Q, Q, Q, delta=DELTA),
    "capabilities": lambda client: client.capabilities(),
    "estimate": lambda client: client.estimate(
        dqkv.Problem(**dict.fromkeys(("q", "k", "v", "dout", "out"), dqkv.Tensor.dense(dqkv.DType.FP16, Q.shape, None)))
    ),
}


@pytest.mark.parametrize("inline_nbytes", [None, -1], ids=["unary", "stream"])
@pytest.mark.parametrize("what", ASKING)
def test_the_shorter_time_holds_also_for_what_is_asked_first(what: str, inline_nbytes: int | None) -> None:
    release = threading.Event()

    class Mute(Script):
        def GetCapabilities(self, request: Any, context: grpc.ServicerContext) -> pb.GetCapabilitiesResponse:
            release.wait(2 * PATIENCE_S)
            return super().GetCapabilities(request, context)

    with serving(Mute([answer])) as address:
        began = time.monotonic()
        with (
            dqkv.Client(address, timeout_s=0.3, inline_nbytes=inline_nbytes) as client,
            pytest.raises(errors.WontFinish),
        ):
            ASKING[what](client)
        with dqkv.Client(address, inline_nbytes=inline_nbytes) as client, pytest.raises(errors.WontFinish):
            client.backward(Q, Q, Q, Q, delta=DELTA, timeout_s=0.3)
        assert time.monotonic() - began < PATIENCE_S
        release.set()


@pytest.mark.parametrize("inline_nbytes", [None, -1], ids=["unary", "stream"])
def test_a_deadline_ends_the_call(inline_nbytes: int | None) -> None:
    release = threading.Event()

    def stream(_: Iterator[Any]) -> Iterator[Any]:
        release.wait(2 * PATIENCE_S)
        yield from ()

    script = Script([slow(release)], stream=stream)
    with serving(script) as address, dqkv.Client(address, inline_nbytes=inline_nbytes) as client:
        began = time.monotonic()
        with pytest.raises(errors.WontFinish):
            client.backward(Q, Q, Q, Q, delta=DELTA, timeout_s=0.3)
        assert time.monotonic() - began < PATIENCE_S
        with pytest.raises(errors.WontFinish):
            client.backward(Q, Q, Q, Q, delta=DELTA, timeout_s=0.0)
        release.set()


@pytest.mark.parametrize("inline_nbytes", [None, -1], ids=["unary", "stream"])
def test_closing_the_client_ends_the_calls_of_other_threads(inline_nbytes: int | None) -> None:
    release, arrived = threading.Event(), threading.Event()

    def stream(_: Iterator[Any]) -> Iterator[Any]:
        arrived.set()
        release.wait(2 * PATIENCE_S)
        yield from ()

    script = Script([slow(release)], arrived=arrived, stream=stream)
    with serving(script) as address, ThreadPoolExecutor(1) as pool:
        client = dqkv.Client(address, inline_nbytes=inline_nbytes, timeout_s=120)
        asked = pool.submit(client.backward, Q, Q, Q, Q, delta=DELTA)
        assert arrived.wait(120)
        client.close()
        with pytest.raises(errors.Cancelled):
            asked.result(120)
        release.set()


@pytest.mark.parametrize("inline_nbytes", [None, -1], ids=["unary", "stream"])
def test_an_interrupt_ends_a_blocking_call(inline_nbytes: int | None) -> None:
    release, arrived = threading.Event(), threading.Event()

    def stream(_: Iterator[Any]) -> Iterator[Any]:
        arrived.set()
        release.wait(2 * PATIENCE_S)
        yield from ()

    program = """
import sys
import numpy as np
import dqkv
q = np.ones((1, 8, 2, 16), np.float16)
with dqkv.Client(sys.argv[1], inline_nbytes=None if sys.argv[2] == "None" else int(sys.argv[2])) as client:
    client.backward(q, q, q, q, out=q)
"""
    with serving(Script([slow(release)], arrived=arrived, stream=stream)) as address:
        process = subprocess.Popen(
            [sys.executable, "-c", program, address, str(inline_nbytes)], stderr=subprocess.PIPE, text=True
        )
        assert arrived.wait(120)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
        release.set()
    assert process.returncode != 0
    assert "KeyboardInterrupt" in said


def test_closing_twice_is_once_and_a_closed_client_says_so() -> None:
    before = set(threading.enumerate())
    client = dqkv.Client("127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(errors.OptionInvalid, match="closed"):
        client.capabilities()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("dqkv")]


# ---- addresses and bytes
@pytest.mark.parametrize(
    ("address", "want"),
    [
        ("host:1", "host:7"),
        ("127.0.0.1:1", "127.0.0.1:7"),
        ("[::1]:1", "[::1]:7"),
        ("ipv4:10.0.0.1:1", "10.0.0.1:7"),
        ("ipv6:[::1]:1", "[::1]:7"),
        ("dns:///host:1", "dns:///host:7"),
        ("dns:host:1", "dns:host:7"),
        ("dns://1.1.1.1/host:1", "dns://1.1.1.1/host:7"),
        ("unix-abstract:dqkv", "127.0.0.1:7"),
        ("unix:/run/dqkv.sock", "127.0.0.1:7"),
    ],
)
def test_the_stream_port_is_on_the_same_host(address: str, want: str) -> None:
    assert Endpoint(address=address).with_port(7).address == want


@pytest.mark.parametrize("kind", [dqkv.Client, dqkv.AsyncClient])
@pytest.mark.parametrize(
    "address",
    [
        "",
        " ",
        ":",
        ":50051",
        "host",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "127.0.0.1:65536",
        "127.0.0.1:-1",
        "127.0.0.1:+1",
        "127.0.0.1:http",
        "127.0.0.1:1 ",
        "127.0.0.1:1/v1",
        "127.0.0.1:1,127.0.0.1:2",
        "http://127.0.0.1:50051",
        "https://host:50051",
        "grpc://host:50051",
        "user@host:1",
        "::1",
        "::1:50051",
        "[::1]",
        "[::1]:0",
        "[host]:1",
        "[127.0.0.1]:1",
        "[]:1",
        "dns:///host",
        "dns:///host:0",
        "unix:",
        "unix-abstract:",
    ],
)
def test_what_is_no_address_is_refused_in_words_when_the_client_is_made(kind: type, address: str) -> None:
    with pytest.raises(errors.OptionInvalid, match="port of 1 to 65535") as caught:
        kind(address)
    assert caught.value.field == "address"
    assert repr(address) in caught.value.message


@pytest.mark.parametrize("token", ["s3cret\n", " s3cret", "\ts3cret\r\n"])
def test_white_space_around_a_token_does_not_count(token: str) -> None:
    assert Endpoint(address="a:1", token=token).metadata() == [("authorization", "Bearer s3cret")]


@pytest.mark.parametrize("token", ["", " ", "\n", "s3\ncret", "s3\x00cret", "s3crèt", "s3\x7fcret", "s3\tcret"])
def test_a_token_that_cannot_travel_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(errors.OptionInvalid) as caught:
        dqkv.Client("127.0.0.1:1", token=token)
    assert caught.value.field == "token"
    assert "s3" not in caught.value.message


# ---- what a failed first contact means
PLAIN, TLS = Contact(tls=False, answered=False), Contact(tls=True, answered=False)
WORDS = {
    "tls port": "UNAVAILABLE: failed to connect to all addresses; last error: UNAVAILABLE: ipv4:1.1.1.1: Socket closed",
    "http port": "UNAVAILABLE: last error: UNIMPLEMENTED: Failed parsing HTTP/2 (Expected SETTINGS frame as the first)",
    "plain port": "UNAVAILABLE: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: WRONG_VERSION_NUMBER",
    "refused": "UNAVAILABLE: Failed to connect to remote host: Connection refused",
}


@pytest.mark.parametrize(
    ("words", "contact", "says"),
    [
        ("tls port", PLAIN, "does the server want TLS?"),
        ("http port", PLAIN, "this looks like the HTTP port"),
        ("plain port", TLS, "no TLS is spoken there"),
        ("tls port", TLS, None),
        ("refused", PLAIN, None),
        ("tls port", Contact(tls=False, answered=True), None),
        ("http port", Contact(tls=False, answered=True), None),
    ],
)
def test_a_hint_is_given_where_the_words_are_a_sign_and_nothing_ever_answered(
    words: str, contact: Contact, says: str | None
) -> None:
    error = errors.TransportError(WORDS[words], field="f", retry_after_s=1.0)
    got = hinted(error, contact)
    assert (type(got), got.field, got.retry_after_s) == (errors.TransportError, "f", 1.0)
    assert got.message.startswith(WORDS[words])
    assert got.message[len(WORDS[words]) :].startswith(f" ({says}" if says else "")
    assert (got is error) == (says is None)


def test_an_http_server_is_called_one_over_a_real_socket() -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"127.0.0.1:{server.server_port}"
        once = Retry(attempts=1)
        with dqkv.Client(address, retry=once) as client, pytest.raises(errors.TransportError, match="HTTP port"):
            client.backward(Q, Q, Q, Q, delta=DELTA)
    finally:
        server.shutdown()
        server.server_close()


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Endpoint(address="a:1", token="secret"))


def test_a_certificate_needs_its_key(tmp_path: Any) -> None:
    with pytest.raises(errors.OptionInvalid):
        dqkv.Tls(certificate=tmp_path / "cert.pem")
    with pytest.raises(errors.OptionInvalid, match="cannot be read"):
        dqkv.Client("a:1", tls=dqkv.Tls(root_ca=tmp_path / "none.pem"))


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a[:, ::2],
        lambda a: a[..., ::3],
        lambda a: a.transpose(2, 0, 1),
        lambda a: np.broadcast_to(a[:1, :1], (3, 700, 1001)),
        lambda a: a[:, :0],
        lambda a: a[::-1],
    ],
)
def test_arrays_of_any_strides_stream_as_dense_frames_of_bounded_size(view: Callable[[Any], Any]) -> None:
    array = view(np.arange(3 * 700 * 1001, dtype=np.uint32).reshape(3, 700, 1001))
    sender = Sender([Part("q", array.data)])
    got = np.empty(array.nbytes, np.uint8)
    receiver = Receiver([Part("q", got.data)])
    for frame in sender.frames():
        assert 0 < frame.nbytes <= framing.CHUNK_NBYTES
        receiver.take(frame)
    receiver.finish(sender.trailer())
    assert np.array_equal(got.view(np.uint32), np.ascontiguousarray(array).reshape(-1))
