"""Any bytes as a stream's first frame: a job whose memory is what its header says, or a typed error; nothing is run."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import Callable, Sequence

import atheris

with atheris.instrument_imports(include=["dqkv"]):
    from dqkv import errors, framing
    from dqkv.backend.base import DeviceInfo, DeviceState, Task
    from dqkv.memory.block import Block
    from dqkv.memory.regions import RegionLimits, RegionTable
    from dqkv.memory.staging import StagingPool
    from dqkv.metrics import Metrics
    from dqkv.problem import Arch, Report
    from dqkv.scheduler.queue import Scheduler, SchedulerLimits
    from dqkv.server.gradient import Desk, Order
    from dqkv.server.identity import Identity
    from dqkv.tensor import DType
    from dqkv.v1 import gradient_pb2 as pb

from google.protobuf.message import DecodeError

from fuzz import mutation

STAGING_NBYTES = 1 << 20
CALLER = Identity(name="me", rights=frozenset())


class UntouchedDevice:
    """A CPU that is ready, was measured, and must never be given one of these requests."""

    name = "cpu:0"
    state = DeviceState.STARTING
    info = DeviceInfo(name="cpu:0", archs=(Arch.CPU,), dtypes=tuple(DType))
    fault = ""

    def __init__(self) -> None:
        self._measuring = True
        self._on_change: Callable[[], None] = lambda: None

    def watch(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    async def start(self) -> None:
        self.state = DeviceState.OK
        self._on_change()

    async def stop(self) -> None:
        self.state = DeviceState.LOST

    def drop_block(self, block_id: int) -> None:
        pass

    async def run(self, task: Task, blocks: Sequence[Block]) -> Report:
        assert self._measuring, "a header alone was launched"
        return Report(arch="cpu", kernel="none", device=self.name, device_s=1e-6)

    def measured(self) -> None:
        self._measuring = False


class Target:
    """The server's way from a first frame to a job, without its sockets and with a device that only watches."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._device = UntouchedDevice()
        block_ids = itertools.count()
        self._scheduler = Scheduler(
            [self._device],
            limits=SchedulerLimits(request_nbytes=STAGING_NBYTES, queue_s=30.0),
            block_ids=block_ids,
            observe=lambda *_: None,
        )
        self._staging = StagingPool(limit_nbytes=STAGING_NBYTES, block_ids=block_ids, on_drop=lambda _: None)
        regions = RegionTable(
            limits=RegionLimits(regions_per_owner=1),
            block_ids=block_ids,
            on_close=lambda _: None,
            observe=lambda *_: None,
            is_own=self._staging.owns,
        )
        self._desk = Desk(
            scheduler=self._scheduler,
            staging=self._staging,
            regions=regions,
            metrics=Metrics(version="", torch="", grpcio=""),
        )
        loop.run_until_complete(self._scheduler.start())
        self._device.measured()

    def open(self, raw: bytes) -> None:
        try:
            frame = framing.decode_request(raw)
        except DecodeError:
            return
        if isinstance(frame, memoryview) or frame.WhichOneof("frame") != "header":
            return
        try:
            self._loop.run_until_complete(self._open(frame.header))
        except errors.InternalFault as error:
            raise AssertionError("a header is never the server's own fault") from error
        except errors.DqkvError:
            pass
        assert self._staging.used_nbytes == 0
        assert all(status.queue_s == 0 for status in self._scheduler.statuses())

    async def _open(self, header: pb.BackwardStreamRequest.Header) -> None:
        order = Order.decode(header.problem, header.request_id)
        job = await self._desk.open(order, caller=CALLER, deadline=None)
        try:
            wanted = sum(part.view.nbytes for part in job.receiving())
            assert wanted == order.streamed_nbytes, header
            given = sum(part.view.nbytes for part in job.sending())
            assert given == sum(tensor.nbytes for tensor in order.answered.values())
            job.fill_inline()
        finally:
            job.close()


def mutate(raw: bytes, max_size: int, seed: int) -> bytes:
    """As in fuzz.problems; on the header's problem."""
    rng = random.Random(seed)
    try:
        message = pb.BackwardStreamRequest.FromString(raw)
    except DecodeError:
        return atheris.Mutate(raw, max_size)
    if message.WhichOneof("frame") != "header" or rng.random() < 0.2:
        return atheris.Mutate(raw, max_size)
    mutation.change(message.header.problem, rng)
    return message.SerializeToString()[:max_size]


def main() -> None:
    loop = asyncio.new_event_loop()
    target = Target(loop)
    atheris.Setup(sys.argv, target.open, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
