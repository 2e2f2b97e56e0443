"""Callers that go away at any moment: nothing of theirs stays in the server, whatever it was doing for them."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import grpc
from rig import regional
from rig.caller import Caller
from rig.memory import PosixMemory
from rig.process import wait_for
from rig.server import Running, running
from rig.wire import assert_right, frames_of, header_of, inline_gradients, sample, streamed_gradients, unary_request

from dqkv.server.app import Server
from dqkv.settings import Settings
from dqkv.v1 import gradient_pb2 as pb

SMALL = sample(32, 2, 32)
CALLERS = 8
CHURN_S = 4.0
STILL_S = 1.0


class Leaver:
    """A caller that begins calls and gives most of them up."""

    def __init__(self, server: Running, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self.left: Counter[str] = Counter()

    def run(self, until: float) -> None:
        ways = (self.leave_stream, self.leave_unary, self.leave_region, self.stay)
        while time.monotonic() < until or len(self.left) < len(ways):
            with Caller(self._server) as caller:
                for _ in range(8):
                    way = self._random.choice(ways)
                    with suppress(grpc.RpcError, grpc.FutureCancelledError):
                        way(caller)
                    self.left[way.__name__] += 1

    def leave_stream(self, caller: Caller) -> None:
        call = caller.stream(frames_of(SMALL))
        self._wait()
        call.cancel()
        list(call)

    def leave_unary(self, caller: Caller) -> None:
        call = caller.gradients.Backward.future(unary_request(SMALL), timeout=120)
        self._wait()
        call.cancel()

    def leave_region(self, caller: Caller) -> None:
        with PosixMemory(regional.nbytes(SMALL)) as memory:
            regional.fill(memory.bytes, SMALL)
            call = caller.gradients.Backward.future(regional.request(SMALL, caller.register(memory, lease_s=1.0)))
            self._wait()
            call.cancel()

    def stay(self, caller: Caller) -> None:
        answer = caller.ask(caller.gradients.Backward, unary_request(SMALL))
        assert_right(SMALL, inline_gradients(SMALL, answer))
        assert_right(SMALL, streamed_gradients(SMALL, caller.stream(frames_of(SMALL))))

    def _wait(self) -> None:
        """Nothing up to the time that a small request takes."""
        time.sleep(self._random.random() ** 2 * 0.03)


def test_callers_that_leave_at_any_moment_leave_nothing() -> None:
    """Memory, queue and regions are free again, and the server drains with nothing left to wait for."""
    with running(cpu_devices="2", log_level="info", drain_s="600") as server:
        leavers = [Leaver(server, seed) for seed in range(CALLERS)]
        until = time.monotonic() + CHURN_S
        threads = [threading.Thread(target=leaver.run, args=(until,)) for leaver in leavers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(sum((leaver.left for leaver in leavers), Counter()))
        for name in ("dqkv_inflight_requests", "dqkv_queue_depth", "dqkv_queue_predicted_seconds", "dqkv_regions"):
            wait_for(lambda name=name: server.metric(name) == 0, f"{name} is 0")
        wait_for(lambda: server.metric("dqkv_staging_pool_bytes", state="used") == 0, "memory is free")
        assert server.metric("dqkv_worker_restarts_total") == 0
        assert server.stop() == 0
        assert server.wait_for("drained")["left"] == 0
        assert not [line for line in server.lines if not line.startswith("{")], "nothing is written beside the log"


def answer_one(server: Running) -> None:
    with Caller(server) as caller:
        assert_right(SMALL, streamed_gradients(SMALL, caller.stream(frames_of(SMALL))))


async def test_a_call_that_ends_before_the_loop_comes_to_it_leaves_nothing() -> None:
    """The loop stands still while a stream begins and is given up: what it then does for it is undone."""
    server = Server(Settings(port=0, stream_port=0, http_port=0, cpu_threads=1))
    await server.start()
    try:
        addresses = server.addresses
        ports = {name: getattr(addresses, name) for name in ("grpc_port", "stream_port", "http_port")}
        at = Running(process=None, events=[{"event": "serving", **ports}])  # type: ignore[arg-type]
        hold = threading.Event()

        def frames() -> Iterator[pb.BackwardStreamRequest]:
            yield header_of(SMALL)
            hold.wait(600)

        def begin_and_leave() -> None:
            with Caller(at) as caller:
                call = caller.stream(frames())
                time.sleep(STILL_S / 2)
                call.cancel()
                hold.set()

        # Memory that is there already is given at once, without a moment at which the giving could be cancelled.
        await asyncio.to_thread(answer_one, at)
        left = asyncio.create_task(asyncio.to_thread(begin_and_leave))
        await asyncio.sleep(0)
        time.sleep(STILL_S)  # noqa: ASYNC251 - this is what is tested
        await left
        await asyncio.to_thread(wait_for, lambda: at.metric("grpc_server_handled_total") == 2, "the call is over")
        for name in ("dqkv_inflight_requests", "dqkv_queue_predicted_seconds"):
            await asyncio.to_thread(wait_for, lambda name=name: at.metric(name) == 0, f"{name} is 0")
        used = {"state": "used"}
        await asyncio.to_thread(wait_for, lambda: at.metric("dqkv_staging_pool_bytes", **used) == 0, "memory is free")
    finally:
        await server.stop()
