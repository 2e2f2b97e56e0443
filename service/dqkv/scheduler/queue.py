"""Takes requests on or refuses them, gives each a device in its turn, and lets none slip when a device dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

from dqkv import errors
from dqkv.backend.base import Device, DeviceState, Task
from dqkv.memory.block import Block, InBlock
from dqkv.problem import Problem, Report
from dqkv.scheduler import calibration
from dqkv.scheduler.cost import Estimate, Sample, Work
from dqkv.scheduler.lane import DeviceStatus, Lane, Ticket
from dqkv.scheduler.placement import finish_s, place
from dqkv.tensor import Tensor

_log = logging.getLogger(__name__)

MEASURE_AGAIN_S = 5.0
"""Pause before a device whose small runs failed is tried again."""

RETRY_AFTER_S = 0.1
"""The least that a refused caller is asked to wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """request_nbytes is the largest request, inputs and gradients together, as if every tensor were dense.

    queue_s are the predicted seconds of work that wait for a device; where several owners wait, each may hold its
    share of them, so that one that floods the queue does not lock the others out.
    """

    request_nbytes: int
    queue_s: float


class Scheduler:
    """Every device and all work that is bound to them. Everything here runs on one event loop.

    `block_ids` numbers the blocks of this server. `observe(estimate, report)` is called for each finished request:
    (report.device_s + report.transfer_s) / estimate.device_s says how good the prediction was.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        limits: SchedulerLimits,
        block_ids: Iterator[int],
        observe: Callable[[Estimate, Report], None],
    ) -> None:
        self._lanes = [Lane(device) for device in devices]
        self._limits = limits
        self._block_ids = block_ids
        self._observe = observe
        self._task_ids = itertools.count(1)
        self._draining = False
        self._stopping = False
        self._measuring: dict[str, asyncio.Task[None]] = {}

    def add(self, devices: Iterable[Device]) -> None:
        """Further devices, found before `start`."""
        self._lanes += [Lane(device) for device in devices]

    async def start(self) -> None:
        """Start every device; return when each is ready and measured, or its first start failed."""
        for lane in self._lanes:
            lane.device.watch(partial(self._on_device_change, lane))
        await asyncio.gather(*(lane.device.start() for lane in self._lanes))
        await asyncio.gather(*(lane.decided.wait() for lane in self._lanes))

    def turn_away(self) -> None:
        """Take nothing on any more; what was taken on goes on."""
        self._draining = True

    async def stop(self) -> None:
        """End every device; what waits or runs is stopped and fails with Draining, so that another server gets it."""
        self._draining = self._stopping = True
        for task in self._measuring.values():
            task.cancel()
        for lane in self._lanes:
            for ticket in lane.waiting():
                _refuse(ticket, errors.Draining("the server stopped before this request had its turn"))
        await asyncio.gather(
            *(lane.device.stop() for lane in self._lanes), *self._measuring.values(), return_exceptions=True
        )

    @property
    def draining(self) -> bool:
        """Whether nothing is taken on any more."""
        return self._draining

    def statuses(self) -> list[DeviceStatus]:
        """Every device as it is now."""
        return [lane.status() for lane in self._lanes]

    def drop_block(self, block_id: int) -> None:
        """Let every device forget a block that no request in flight names."""
        for lane in self._lanes:
            lane.device.drop_block(block_id)

    def estimate(self, problem: Problem[Any], *, owner: str = "") -> Estimate:
        """What a problem (any shapes) would cost, and where it would run now.

        Raises ArchUnavailable, and DeviceLost while every device that could run it is down.
        """
        work = Work.of(problem)
        return place(self._lanes, work, problem.options.arch, owner)[1]

    def admit(self, problem: Problem[Any], *, owner: str, deadline: float | None) -> Admission:
        """Take a request on: its seconds are held for it until the admission is left.

        `deadline` is on the monotonic clock, None is none. Raises Draining; ArchUnavailable when no device runs its
        arch and dtype; DeviceLost while all that could are down; TooLarge when it could never fit; QueueFull, with
        the seconds to wait; WontFinish when its predicted end is past its deadline.
        """
        if self._draining:
            raise errors.Draining("this server is shutting down and takes no new requests; another one can")
        work = Work.of(problem)
        lane, estimate = place(self._lanes, work, problem.options.arch, owner)
        self._check_size(work)
        self._check_backlog(lane, owner)
        if deadline is not None:
            _check_deadline(estimate, deadline)
        ticket = Ticket(
            owner=owner,
            work=work,
            wanted=problem.options.arch,
            lane=lane,
            arch=estimate.arch,
            seconds=estimate.device_s,
        )
        lane.receive(ticket)
        return Admission(self, ticket, estimate, deadline)

    # ---- what an admission asks for
    async def _take_turn(self, ticket: Ticket) -> None:
        """Return when the ticket's device is its own and OK."""
        while True:
            if self._stopping:
                raise errors.Draining("the server stopped before this request had its turn")
            if ticket.lane.state is not DeviceState.OK:
                self._move(ticket)
            await ticket.lane.wait(ticket)
            if ticket.lane.device.state is DeviceState.OK:
                return
            # It died between giving the turn and taking it.
            ticket.lane.leave(ticket)

    async def _run(self, ticket: Ticket, task: Task, blocks: Sequence[Block], queued_s: float) -> Report:
        lane = ticket.lane
        try:
            report = replace(await lane.device.run(task, blocks), queued_s=queued_s)
        except (errors.Cancelled, errors.DeviceLost):
            if self._stopping:
                raise errors.Draining(f"the server stopped while {lane.device.name} worked on this request") from None
            raise
        seconds = report.device_s + report.transfer_s
        estimate = replace(
            lane.estimate(ticket.work, ticket.arch, ticket.owner), device_s=ticket.seconds, queue_s=queued_s
        )
        lane.cost.observe(Sample(arch=ticket.arch, work=ticket.work, seconds=seconds))
        self._observe(estimate, report)
        return report

    # ---- placement
    def _move(self, ticket: Ticket) -> None:
        """Bind a ticket to the best device there is now. Raises DeviceLost."""
        ticket.lane.leave(ticket)
        ticket.lane, estimate = place(self._lanes, ticket.work, ticket.wanted, ticket.owner)
        ticket.arch, ticket.seconds = estimate.arch, estimate.device_s

    # ---- limits
    def _check_size(self, work: Work) -> None:
        nbytes = work.input_nbytes + work.gradient_nbytes
        if nbytes > self._limits.request_nbytes:
            raise errors.TooLarge(
                f"inputs take {work.input_nbytes} bytes and gradients {work.gradient_nbytes}, together {nbytes}: "
                f"the limit is {self._limits.request_nbytes}"
            )

    def _check_backlog(self, lane: Lane, owner: str) -> None:
        owned = lane.owned_s()
        own = owned.get(owner, 0.0)
        share = self._limits.queue_s / len(owned.keys() | {owner})
        if own >= share:
            wait_s = max((own - share) * len(owned), lane.remaining_s(), RETRY_AFTER_S)
            raise errors.QueueFull(
                f"{lane.device.name} has {own:.3g} s of this caller's work waiting; its share of the "
                f"{self._limits.queue_s:g} s that wait at most is {share:.3g} s",
                retry_after_s=wait_s,
            )

    # ---- devices
    def _on_device_change(self, lane: Lane) -> None:
        device = lane.device
        if device.state is DeviceState.OK:
            if not lane.measured and device.name not in self._measuring:
                self._measuring[device.name] = asyncio.create_task(self._measure(lane))
        elif device.fault:
            lane.decided.set()
            self._rescue(lane)
        lane.dispatch()

    def _rescue(self, lane: Lane) -> None:
        """What waits for a device that is down goes to another one, or goes on waiting for the restart."""
        for ticket in lane.waiting():
            try:
                other, _ = place(self._lanes, ticket.work, ticket.wanted, ticket.owner)
                if other is not lane:
                    self._move(ticket)
                    ticket.lane.wait(ticket)
            except errors.DqkvError as error:
                lane.leave(ticket)
                _refuse(ticket, error)

    async def _measure(self, lane: Lane) -> None:
        device = lane.device
        try:
            while device.info is not None and device.state is DeviceState.OK:
                try:
                    lane.cost = await calibration.measure(
                        device, device.info, block_ids=self._block_ids, task_ids=self._task_ids
                    )
                except errors.DeviceLost:
                    return
                except (errors.DqkvError, OSError) as error:
                    building = isinstance(error, errors.KernelBuilding)
                    defect = f"its small runs {'wait' if building else 'failed'}: {error}"
                    if defect != lane.defect:
                        # Once: the next tries come every few seconds, and mostly end the same way.
                        _log.log(logging.INFO if building else logging.ERROR, "device %s: %s", device.name, defect)
                    lane.defect = defect
                    lane.decided.set()
                    await asyncio.sleep(MEASURE_AGAIN_S)
                    continue
                lane.measured, lane.defect = True, ""
                lane.decided.set()
                return
        finally:
            del self._measuring[device.name]
            lane.dispatch()


class Admission:
    """A request that was taken on; leaving it gives back what it holds.

    It is run once, and everything that it was given stays its own until `run` is over, also when it is cancelled.
    """

    def __init__(self, scheduler: Scheduler, ticket: Ticket, estimate: Estimate, deadline: float | None) -> None:
        self.estimate = estimate
        self._scheduler = scheduler
        self._ticket: Ticket | None = ticket
        self._deadline = deadline

    def __enter__(self) -> Admission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give back the seconds that were held; nothing after `run` has begun."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.lane.leave(ticket)

    async def run(
        self, problem: Problem[InBlock], gradients: dict[str, Tensor[InBlock]], blocks: Sequence[Block]
    ) -> Report:
        """Wait for the device and let it write every gradient; queued_s of the report is the wait.

        When this returns, raises or ends by cancellation, no device touches the blocks any more. Raises WontFinish
        when the deadline passes meanwhile, DeviceLost, DeviceOutOfMemory, Draining, and what the device answers.
        """
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            raise errors.InternalFault("an admission can be run once, and not after it was left")
        begun = time.monotonic()
        stage = "in the queue"
        limit = asyncio.timeout(None if self._deadline is None else self._deadline - begun)
        try:
            async with limit:
                await self._scheduler._take_turn(ticket)
                stage = f"while {ticket.lane.device.name} worked on it"
                task = Task(task_id=next(self._scheduler._task_ids), problem=problem, gradients=gradients)
                return await self._scheduler._run(ticket, task, blocks, time.monotonic() - begun)
        except TimeoutError:
            raise errors.WontFinish(
                f"the deadline passed {stage}, {time.monotonic() - begun:.3g} s after its tensors were there"
            ) from None
        finally:
            ticket.lane.leave(ticket)


def _check_deadline(estimate: Estimate, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if finish_s(estimate) > left_s:
        raise errors.WontFinish(
            f"{max(left_s, 0.0):.3g} s are left before the deadline; {estimate.device} would begin in "
            f"{estimate.queue_s:.3g} s and take {estimate.device_s:.3g} s"
        )


def _refuse(ticket: Ticket, error: errors.DqkvError) -> None:
    if ticket.turn is not None and not ticket.turn.done():
        ticket.turn.set_exception(error)
