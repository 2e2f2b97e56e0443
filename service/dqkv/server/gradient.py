"""What unary call and stream share: a request is admitted, gets its memory, goes through a device, is answered."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from dqkv import codec, errors, framing
from dqkv.location import Inline, InRegion, InStream, Location
from dqkv.memory.block import Block, InBlock
from dqkv.memory.regions import RegionTable
from dqkv.memory.staging import Staging, StagingPool
from dqkv.metrics import Metrics
from dqkv.problem import Problem, Report
from dqkv.scheduler.queue import Admission, Scheduler
from dqkv.server.identity import Identity
from dqkv.tensor import Tensor
from dqkv.v1 import gradient_pb2 as pb

REQUEST_ID_LIMIT = 128
_NO_BYTES: Location = Inline(memoryview(b""))
SLOT_ALIGNMENT = 64
"""Bytes; a cache line, and what vector loads of every device like best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A request as it was decoded: the problem, which gradients go to regions, and the order of its tensors' bytes."""

    request_id: str
    problem: Problem[Location]
    outputs: dict[str, Tensor[InRegion]]
    roles: tuple[str, ...]

    @staticmethod
    def decode(message: pb.Problem, request_id: str) -> Order:
        """Raises the InvalidRequest of the first thing that is wrong with the message."""
        if len(request_id) > REQUEST_ID_LIMIT:
            raise errors.MessageInvalid(
                f"request_id has {len(request_id)} characters, the limit is {REQUEST_ID_LIMIT}", field="request_id"
            )
        problem = codec.decode_problem(message)
        return Order(
            request_id=request_id or uuid.uuid4().hex,
            problem=problem,
            outputs=codec.decode_outputs(message, problem),
            roles=codec.roles(message),
        )

    def without_bytes(self) -> Order:
        """The same order without the bytes of its inline tensors."""
        emptied = {
            role: tensor.with_data(_NO_BYTES) if isinstance(tensor.data, Inline) else tensor
            for role, tensor in self.problem.tensors.items()
        }
        return replace(self, problem=self.problem.with_tensors(emptied))

    @property
    def staged(self) -> dict[str, Tensor[Location]]:
        """The inputs that do not lie in regions, in the order of their bytes."""
        tensors = self.problem.tensors
        return {role: tensors[role] for role in self.roles if not isinstance(tensors[role].data, InRegion)}

    @property
    def in_regions(self) -> dict[str, Tensor[InRegion]]:
        """The inputs that lie in regions."""
        return {
            role: tensor.with_data(tensor.data)
            for role, tensor in self.problem.tensors.items()
            if isinstance(tensor.data, InRegion)
        }

    @property
    def answered(self) -> dict[str, Tensor[None]]:
        """The gradients that are sent back, in order."""
        return {role: tensor for role, tensor in self.problem.gradients.items() if role not in self.outputs}

    @property
    def inline_nbytes(self) -> int:
        """Bytes of the inputs in the message."""
        return sum(tensor.nbytes for tensor in self.staged.values() if isinstance(tensor.data, Inline))

    @property
    def streamed_nbytes(self) -> int:
        """Bytes of the inputs that come in data frames."""
        return sum(tensor.nbytes for tensor in self.staged.values() if isinstance(tensor.data, InStream))

    @property
    def region_nbytes(self) -> int:
        """Bytes of the inputs in regions."""
        return sum(tensor.nbytes for tensor in self.in_regions.values())


class Job:
    """A request that was admitted: its memory until `close`, and its way through the device.

    It belongs to the loop; only `fill_inline` and the views may be used elsewhere.
    """

    def __init__(self, order: Order, admission: Admission, memory: _Memory, held: ExitStack) -> None:
        self.order = order
        self.estimate = admission.estimate
        self._admission = admission
        self._memory = memory
        self._held = held
        self._running = False
        self._close_after_run = False

    def receiving(self) -> list[framing.Part]:
        """Where the data frames' bytes go, in their order."""
        streamed = (role for role, tensor in self.order.staged.items() if isinstance(tensor.data, InStream))
        return [framing.Part(role, self._memory.view(role)) for role in streamed]

    def fill_inline(self) -> None:
        """Copies the inline tensors' bytes to their slots and lets the message go.

        Large ones take their time, so not on the loop.
        """
        for role, tensor in self.order.staged.items():
            if isinstance(tensor.data, Inline):
                self._memory.view(role)[:] = tensor.data.view
        self.order = self.order.without_bytes()

    def sending(self) -> list[framing.Part]:
        """The gradients that are sent back, in order; the views are valid until `close`."""
        return [framing.Part(role, self._memory.view(role)) for role in self.order.answered]

    async def run(self) -> Report:
        """Waits for the device and runs; total_s counts from here. Raises what scheduler and device raise."""
        began = time.monotonic()
        self._running = True
        try:
            problem = self.order.problem.with_tensors(self._memory.inputs)
            report = await self._admission.run(problem, self._memory.gradients, self._memory.blocks)
        finally:
            self._running = False
            if self._close_after_run:
                self._held.close()
        return replace(report, total_s=time.monotonic() - began)

    def close(self) -> None:
        """Gives everything back; where a device may still touch the memory, as soon as it does not. Idempotent."""
        if self._running:
            self._close_after_run = True
        else:
            self._held.close()


class Desk:
    """Takes orders: holds them against the limits, admits them, hands out their memory. It belongs to the loop."""

    def __init__(self, *, scheduler: Scheduler, staging: StagingPool, regions: RegionTable, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._staging = staging
        self._regions = regions
        self._metrics = metrics
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self, timeout_s: float) -> int:
        """Waits until no order is open; returns how many still are when the time is up."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return self._open
        return 0

    async def open(self, order: Order, *, caller: Identity, deadline: float | None) -> Job:
        """Admits an order and gets its memory; nothing was read before, nothing is launched yet.

        deadline is absolute, of time.monotonic(). Raises what scheduler, staging and regions raise;
        then nothing is held. The job has to be closed.
        """
        with ExitStack() as stack:
            admission = stack.enter_context(self._scheduler.admit(order.problem, owner=caller.name, deadline=deadline))
            stack.enter_context(self._metrics.inflight())
            self._open += 1
            self._idle.clear()
            stack.callback(self._closed)
            memory = await self._place(order, caller, stack)
            return Job(order, admission, memory, stack.pop_all())

    async def _place(self, order: Order, caller: Identity, stack: ExitStack) -> _Memory:
        memory = _Memory()
        reads = order.in_regions
        if reads or order.outputs:
            use = stack.enter_context(self._regions.use(caller.name, reads=reads, writes=order.outputs))
            memory.blocks += use.blocks
            memory.inputs |= {role: use.tensors[role] for role in reads}
            memory.gradients |= {role: use.tensors[role] for role in order.outputs}
        nbytes = memory.lay_out({**order.staged, **order.answered})
        if nbytes:
            memory.staging = stack.enter_context(await self._staging.acquire_async(nbytes))
            memory.blocks.append(memory.staging.block)
            block_id = memory.staging.block.block_id
            for tensors, placed in ((order.staged, memory.inputs), (order.answered, memory.gradients)):
                for role, tensor in tensors.items():
                    placed[role] = tensor.with_data(InBlock(block_id, memory.slots[role][0]))
        return memory

    def _closed(self) -> None:
        self._open -= 1
        if not self._open:
            self._idle.set()


class _Memory:
    """Where every tensor of one request is: in its staging block, slot by slot, or in regions."""

    def __init__(self) -> None:
        self.slots: dict[str, tuple[int, int]] = {}
        self.staging: Staging | None = None
        self.blocks: list[Block] = []
        self.inputs: dict[str, Tensor[InBlock]] = {}
        self.gradients: dict[str, Tensor[InBlock]] = {}

    def lay_out(self, tensors: Mapping[str, Tensor[Any]]) -> int:
        """Gives each tensor a slot (first and last byte); returns the bytes of all, 0 without tensors."""
        end = 0
        for role, tensor in tensors.items():
            self.slots[role] = (end, end + tensor.nbytes)
            end += -(-tensor.nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        # Empty tensors, too, are in some block.
        return max(end, SLOT_ALIGNMENT) if tensors else 0

    def view(self, role: str) -> memoryview:
        """The bytes of a tensor in staging memory."""
        if self.staging is None:
            raise KeyError(role)
        start, end = self.slots[role]
        return self.staging.view[start:end]


def name_gradients(order: Order, sent: Mapping[str, Location]) -> list[pb.Tensor]:
    """Every gradient as the answer names it: where `sent` says by role, or in the region it was written to."""
    messages = []
    for role, tensor in order.problem.gradients.items():
        where = order.outputs.get(role)
        messages.append(codec.encode_tensor(role, tensor.with_data(sent[role]) if where is None else where))
    return messages
