"""One device with the work that is bound to it: being received, waiting and running, and how long that will take."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from dqkv.backend.base import Device, DeviceInfo, DeviceState
from dqkv.problem import Arch
from dqkv.scheduler.cost import CostModel, Estimate, Work
from dqkv.scheduler.fairness import FairQueue
from dqkv.tensor import DType


@dataclass(eq=False, kw_only=True, slots=True)
class Ticket:
    """A request that was taken on: whose it is, what it asks for, where it goes, and its predicted seconds there.

    `turn` is done when the device is its own; None while its tensors are still on their way.
    """

    owner: str
    work: Work
    wanted: Arch
    lane: Lane
    arch: Arch
    seconds: float
    turn: asyncio.Future[None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceStatus:
    """A device as an operator sees it; queue_s are predicted seconds of work bound to it.

    info is None until the device was ready once; fault says in words why it is not OK.
    """

    name: str
    info: DeviceInfo | None
    state: DeviceState
    fault: str
    queue_s: float
    waiting: int
    running: int


@dataclass(eq=False, slots=True)
class Lane:
    """A device, its cost model and its queue. One ticket runs at a time.

    `defect` says why a device that is there gives no right answers; `decided` is set once its first start went well
    or failed.
    """

    device: Device
    cost: CostModel = field(default_factory=CostModel)
    measured: bool = False
    defect: str = ""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    _receiving: set[Ticket] = field(default_factory=set)
    _waiting: FairQueue[Ticket] = field(default_factory=FairQueue)
    _running: Ticket | None = None
    _running_since: float = 0.0

    @property
    def state(self) -> DeviceState:
        """OK when the next ticket can run at once or after others."""
        if self.defect:
            return DeviceState.LOST
        if self.device.state is DeviceState.OK and not self.measured:
            return DeviceState.STARTING
        return self.device.state

    @property
    def fault(self) -> str:
        """Why it is not OK, in words; "" when it is, or has only not started yet."""
        return self.defect or self.device.fault

    def arch_for(self, arch: Arch, dtype: DType) -> Arch | None:
        """The arch that would run inputs of this dtype; None when it cannot, or is not known yet."""
        info = self.device.info
        if info is None or dtype not in info.dtypes:
            return None
        if arch is Arch.AUTO:
            return info.archs[0]
        return arch if arch in info.archs else None

    def status(self) -> DeviceStatus:
        """What there is now."""
        return DeviceStatus(
            name=self.device.name,
            info=self.device.info,
            state=self.state,
            fault=self.fault,
            queue_s=self.backlog_s(),
            waiting=len(self._waiting),
            running=int(self._running is not None),
        )

    # ---- how long
    def estimate(self, work: Work, arch: Arch, owner: str) -> Estimate:
        """What work of an owner would cost here, behind what is here now."""
        seconds = self.cost.predict(arch, work)
        return Estimate(
            pairs=work.pairs,
            flops=work.flops,
            input_nbytes=work.input_nbytes,
            gradient_nbytes=work.gradient_nbytes,
            device_s=seconds,
            queue_s=self.wait_s(owner, seconds),
            device=self.device.name,
            arch=arch,
        )

    def backlog_s(self) -> float:
        """Predicted seconds of all that is bound to this device, without what the running ticket has behind it."""
        return self.remaining_s() + sum(self.owned_s().values())

    def remaining_s(self) -> float:
        """Predicted seconds until the running ticket is done."""
        if self._running is None:
            return 0.0
        return max(self._running.seconds - (time.monotonic() - self._running_since), 0.0)

    def owned_s(self) -> dict[str, float]:
        """Predicted seconds that are received or wait, by owner."""
        owned: dict[str, float] = {}
        for ticket in (*self._receiving, *self._waiting.items()):
            owned[ticket.owner] = owned.get(ticket.owner, 0.0) + ticket.seconds
        return owned

    def wait_s(self, owner: str, seconds: float) -> float:
        """Predicted seconds before work of that length begins.

        While an owner's work is served, turn by turn, each other owner is served as much at most.
        """
        owned = self.owned_s()
        own = owned.pop(owner, 0.0)
        return self.remaining_s() + own + sum(min(other, own + seconds) for other in owned.values())

    # ---- a ticket's way: receive, wait, run, leave; the last from anywhere
    def receive(self, ticket: Ticket) -> None:
        """Hold its seconds while its tensors are on their way."""
        self._receiving.add(ticket)

    def wait(self, ticket: Ticket) -> asyncio.Future[None]:
        """Queue it; the future is done when the device is its own."""
        self._receiving.discard(ticket)
        if ticket.turn is None or ticket.turn.done():
            ticket.turn = asyncio.get_running_loop().create_future()
        self._waiting.push(ticket.owner, ticket.seconds, ticket)
        self.dispatch()
        return ticket.turn

    def leave(self, ticket: Ticket) -> None:
        """Give back all that it holds here; the next one gets its turn."""
        self._receiving.discard(ticket)
        self._waiting.remove(ticket)
        if self._running is ticket:
            self._running = None
        self.dispatch()

    def dispatch(self) -> None:
        """Give the device to the ticket whose turn it is, if the device is free and OK."""
        while self._running is None and self.state is DeviceState.OK and len(self._waiting):
            ticket = self._waiting.pop()
            if ticket.turn is not None and not ticket.turn.done():
                self._running, self._running_since = ticket, time.monotonic()
                ticket.turn.set_result(None)

    def waiting(self) -> list[Ticket]:
        """The tickets in the queue."""
        return self._waiting.items()
