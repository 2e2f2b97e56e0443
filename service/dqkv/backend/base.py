"""What a device is and what it is asked: the values that cross from the server's front to a device's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dqkv.memory.block import Block, InBlock
from dqkv.problem import Arch, Problem, Report
from dqkv.tensor import DType, Tensor


class DeviceState(StrEnum):
    """Whether a device takes work."""

    STARTING = "starting"
    OK = "ok"
    LOST = "lost"


class DeviceBroken(Exception):
    """A device does no more work in this process, which has to end; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """A device as its process sees it: name ("cpu:0"), the archs it runs, best first, and the input dtypes it takes.

    model is what its maker calls it, "" for a CPU.
    """

    name: str
    archs: tuple[Arch, ...]
    dtypes: tuple[DType, ...]
    model: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One backward for a device: the problem with its tensors in blocks, and where each gradient goes.

    `gradients` has every role of `problem.gradients`, any strides; each is written in full.
    """

    task_id: int
    problem: Problem[InBlock]
    gradients: dict[str, Tensor[InBlock]]


class Backend(Protocol):
    """What does the work of one device, inside the device's process; one thread makes every call."""

    @property
    def info(self) -> DeviceInfo:
        """The device, as it was found."""

    def add_block(self, block: Block) -> None:
        """Know a block; its file belongs to the backend from now on."""

    def drop_block(self, block_id: int) -> None:
        """Forget a block and close its file; an unknown one is nothing."""

    def run(self, task: Task, should_stop: Callable[[], bool]) -> Report:
        """Write every gradient of the task.

        Raises Cancelled once `should_stop` said so, MemoryError, the DqkvError of what it cannot do, and DeviceBroken
        when it can do nothing more.
        """


class Device(Protocol):
    """A device as the front sees it; every method is called on the front's event loop."""

    @property
    def name(self) -> str:
        """Such as "cpu:0"."""

    @property
    def state(self) -> DeviceState:
        """Whether it takes work now."""

    @property
    def info(self) -> DeviceInfo | None:
        """What it can do; None until it was ready once."""

    @property
    def fault(self) -> str:
        """Why it takes no work, in words; "" when it does, or has only not started yet."""

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` after every change of `state`."""

    async def start(self) -> None:
        """Begin to start it, and return before it is ready."""

    async def stop(self) -> None:
        """End it; what still runs there fails with DeviceLost."""

    def drop_block(self, block_id: int) -> None:
        """Forget a block that no task in flight names."""

    async def run(self, task: Task, blocks: Sequence[Block]) -> Report:
        """Do a task whose tensors lie in `blocks`.

        It returns, raises or ends by cancellation only when nothing on the device touches the blocks any more.
        Raises DeviceLost when the device is not OK or dies, and the DqkvError that the device answered.
        """
