"""A worker as a device of the front: a server on another machine, which is asked over its own wire."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from dqkv import errors
from dqkv.backend.base import DeviceInfo, DeviceState, Task
from dqkv.backend.life import Death, settle
from dqkv.backend.standing import Backoff, Standing
from dqkv.client.arrays import HostArray, host_tensor
from dqkv.client.capabilities import Capabilities
from dqkv.client.client import AsyncClient
from dqkv.client.retry import Retry
from dqkv.cluster.blocks import ArrayBlocks
from dqkv.memory.block import Block, InBlock
from dqkv.problem import Arch, Problem, Report
from dqkv.tensor import DType, Tensor

LOOK_S = 1.0
"""Pause between two looks at a worker's device; a request that fails there is followed by a look at once."""
ANSWER_TIMEOUT_S = 30.0
MISSES_LIMIT = 3
"""Looks in a row that a worker may leave unanswered: a node that stands still for a moment has lost nothing yet."""
START_TIMEOUT_S = 300.0
"""A cold node loads PyTorch with CUDA, finds its GPU and compares its speed: minutes at the worst."""
END_TIMEOUT_S = 30.0

LOST = (
    errors.TransportError,  # it died, or the network between ended the call
    errors.Draining,  # it is being stopped
    errors.DeviceLost,  # the process of its device died; it is still there
    errors.Unauthenticated,  # another one listens at its address by now
    errors.Cancelled,  # this side gave it up
    errors.StreamIdle,
    errors.Truncated,
    errors.ChecksumMismatch,
)
"""What a worker's answer can be that says nothing of the request: sent again, it can be answered."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Seat(Protocol):
    """Where a worker runs, as the engine that keeps it alive knows it."""

    async def address(self) -> str:
        """Where its server listens, once it serves: "host:port". Raises Exception in words while it does not."""

    async def restart(self) -> None:
        """Ends it by force; the engine starts it again."""

    async def end(self) -> None:
        """Lets its server stop, and ends it for good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Post:
    """A worker's name in the front ("ray:0"), the token that its server asks for, and how it is looked at, in seconds.

    look_s: the pause between two looks. answer_timeout_s: the wait for an answer. start_timeout_s: for its start.
    """

    name: str
    token: str
    look_s: float = LOOK_S
    answer_timeout_s: float = ANSWER_TIMEOUT_S
    start_timeout_s: float = START_TIMEOUT_S


class WorkerDevice(Standing):
    """A `Device` whose work is done by a worker's server.

    `on_restart(name, death)` is called for each time that a worker that served was lost.
    """

    def __init__(
        self,
        post: Post,
        seat: Seat,
        *,
        on_restart: Callable[[str, Death], None],
        backoff: Backoff | None = None,
    ) -> None:
        super().__init__(post.name, on_restart=on_restart, backoff=backoff)
        self._post = post
        self._seat = seat
        self._client: AsyncClient | None = None
        self._blocks = ArrayBlocks()
        self._doubt = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to start the worker, and return before it is ready."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise(), name=f"dqkv worker {self.name}")

    async def stop(self) -> None:
        """End the worker: its server stops what still runs there."""
        if self._supervisor is None:
            return
        self._supervisor.cancel()
        await settle(self._supervisor)
        self._supervisor = None
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._seat.end()
        except Exception as error:  # noqa: BLE001 - the front stops, whatever becomes of the worker
            _log.warning("device %s: it did not end: %s", self.name, error)
        self._become(DeviceState.LOST, "it was stopped")

    def drop_block(self, block_id: int) -> None:
        """Forget a block that no task in flight names."""
        self._blocks.drop(block_id)

    async def run(self, task: Task, blocks: Sequence[Block]) -> Report:
        """Send a task to the worker and receive its gradients where they belong.

        transfer_s of the report is all of the time that the worker's device did not compute, the way there and back
        included. When this returns, raises or ends by cancellation, nothing here touches the blocks any more.
        Raises DeviceLost when the worker is not there or is lost meanwhile, and the DqkvError that it answered.
        """
        client = self._client
        if client is None or self._state is not DeviceState.OK:
            raise errors.DeviceLost(f"{self.name} takes no work: {self._fault or 'it is starting'}")
        begun = time.monotonic()
        self._blocks.know(blocks)
        problem = await _to_end(partial(self._read, task.problem))
        places = {
            role: self._blocks.view(tensor)
            for role, tensor in task.gradients.items()
            if tensor.is_dense and self._blocks.is_mappable(tensor)
        }
        try:
            answer = await client.submit(problem, places, timeout_s=math.inf)
        except LOST as error:
            words = f"{type(error).__name__}: {error.message}"
            self._lose(words)
            raise errors.DeviceLost(
                f"the worker {self.name} was lost while it worked on this request; it can be sent again ({words})"
            ) from None
        rest = {role: getattr(answer, role) for role in task.gradients if role not in places}
        if rest:
            await _to_end(partial(self._write, task.gradients, rest))
        self._deaths = 0
        transfer_s = max(time.monotonic() - begun - answer.report.device_s, 0.0)
        return replace(answer.report, device=self.name, queued_s=0.0, transfer_s=transfer_s)

    # ---- memory
    def _read(self, problem: Problem[InBlock]) -> Problem[HostArray]:
        blocks, arrays = self._blocks, {}
        for role, tensor in problem.tensors.items():
            array = blocks.view(tensor) if blocks.is_mappable(tensor) else blocks.copy(tensor)
            arrays[role] = host_tensor(role, array)
        return problem.with_tensors(arrays)

    def _write(self, gradients: dict[str, Tensor[InBlock]], arrays: dict[str, HostArray]) -> None:
        for role, array in arrays.items():
            self._blocks.write(gradients[role], array)

    # ---- the worker's life
    async def _supervise(self) -> None:
        while True:
            try:
                await self._attend()
            except Exception as error:  # noqa: BLE001 - the engine's errors are of any kind, and the worker must return
                # Ray's words end with what matters.
                said = str(error).strip().splitlines() or [type(error).__name__]
                self._mourn(said[-1])
            await asyncio.sleep(self._wait_s)

    async def _attend(self) -> None:
        """Find the worker and look at it for as long as it answers. Raises what the engine or the worker said last."""
        try:
            async with asyncio.timeout(self._post.start_timeout_s):
                address = await self._seat.address()
        except TimeoutError:
            await self._seat.restart()
            raise TimeoutError(
                f"not started within {self._post.start_timeout_s:g} s: is there a node with room for it?"
            ) from None
        async with AsyncClient(address, token=self._post.token, retry=Retry(attempts=1)) as client:
            self._client = client
            try:
                while True:
                    self._doubt.clear()
                    self._see(await self._look(client), address)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._post.look_s):
                            await self._doubt.wait()
            except errors.DqkvError as error:
                self._lose(error.message)
                raise
            finally:
                # Before the client closes, so that nobody gives it a task any more.
                self._client = None

    async def _look(self, client: AsyncClient) -> Capabilities:
        """What the worker says of itself. Raises TransportError when it is gone, or does not answer for too long."""
        for _ in range(MISSES_LIMIT):
            with suppress(TimeoutError, errors.WontFinish):
                async with asyncio.timeout(self._post.answer_timeout_s):
                    return await client.capabilities()
        raise errors.TransportError(f"it left {MISSES_LIMIT} looks unanswered")

    def _see(self, capabilities: Capabilities, address: str) -> None:
        device = next(iter(capabilities.devices), None)
        if device is None:
            raise errors.ArchUnavailable(f"the worker has no device: {'; '.join(capabilities.notes)}")
        if device.state == DeviceState.OK:
            self._failed_starts = 0
            self._info = DeviceInfo(
                name=self.name,
                archs=tuple(Arch(arch) for arch in device.archs),
                dtypes=tuple(DType(dtype) for dtype in device.dtypes),
                model=f"{device.name} at {address}",
            )
            self._become(DeviceState.OK, "")
            return
        words = f"its device {device.name} is {device.state}"
        self._lose(words)
        self._become(DeviceState(device.state), words)

    def _lose(self, words: str) -> None:
        """Take it for gone until the next look, which comes at once; a request sent again must not come back here."""
        self._doubt.set()
        if self._state is DeviceState.OK:
            self._deaths += 1
            self._on_restart(self.name, Death.EXIT)
            self._become(DeviceState.STARTING, words)

    def _mourn(self, words: str) -> None:
        self._failed_starts += 1
        _log.warning("device %s: %s", self.name, words)
        self._fail(words, DeviceState.STARTING)


async def _to_end(work: Callable[[], T]) -> T:
    """What `work` returns, from a thread; a cancellation waits for its end, for it touches memory of others."""
    job = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.wait({job})
    except asyncio.CancelledError:
        await settle(job)
        job.exception()
        raise
    return job.result()
