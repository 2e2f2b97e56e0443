"""One process of a device from its start to its death, and the tasks that it was given."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dqkv import errors
from dqkv.backend import messages
from dqkv.backend.base import DeviceInfo, Task
from dqkv.backend.channel import Channel
from dqkv.memory.block import Block
from dqkv.problem import Report

_log = logging.getLogger(__name__)


class Death(StrEnum):
    """Why a device's process ended: the label of the metric that counts restarts."""

    SIGNAL = "signal"
    EXIT = "exit"
    NOT_READY = "not_ready"
    STUCK = "stuck"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSettings:
    """One device: its name ("cpu:0"), the threads that compute, its address-space limit in bytes (None is no limit).

    kernels is the directory that a GPU ("cuda:0") takes its kernels from; builds_kernels says that what is missing
    there is built when it is needed.
    start_timeout_s is how long it may take to get ready, cancel_timeout_s how long a cancelled task may go on before
    its process is killed, stop_timeout_s how long the process may take to end when asked to.
    """

    name: str
    num_threads: int
    address_space_nbytes: int | None = None
    kernels: Path | None = None
    builds_kernels: bool = False
    start_timeout_s: float = 60.0
    cancel_timeout_s: float = 10.0
    stop_timeout_s: float = 5.0


class Life:
    """A process that was started; `bury` has to be awaited whatever happens."""

    def __init__(self, settings: DeviceSettings, process: asyncio.subprocess.Process, channel: Channel) -> None:
        self._settings = settings
        self._process = process
        self._channel = channel
        self._blocks: set[int] = set()
        self._tasks: dict[int, asyncio.Future[Report]] = {}
        self._death: tuple[Death, str] | None = None

    @classmethod
    async def begin(cls, settings: DeviceSettings) -> Life:
        """Start the process. Raises OSError when the machine cannot."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # -P: what lies in the working directory is not imported.
        command = [sys.executable, "-P", "-m", "dqkv.backend.worker", settings.name]
        command += ["--socket-fd", str(theirs.fileno()), "--num-threads", str(settings.num_threads)]
        if settings.address_space_nbytes is not None:
            command += ["--address-space-nbytes", str(settings.address_space_nbytes)]
        if settings.kernels is not None:
            command += ["--kernels", str(settings.kernels)]
        if settings.builds_kernels:
            command.append("--build-kernels")
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
        except BaseException:
            ours.close()
            raise
        return cls(settings, process, Channel(ours))

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    async def until_ready(self) -> DeviceInfo | None:
        """The device, once its process is ready; None when it refuses, ends or takes too long."""
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                message = await self._channel.receive()
        except TimeoutError:
            self._death = (Death.NOT_READY, f"its process was not ready after {self._settings.start_timeout_s:g} s")
            return None
        if isinstance(message, messages.Ready):
            return message.info
        said = message.message if isinstance(message, messages.Refused) else "its process ended before it was ready"
        self._death = (Death.NOT_READY, said)
        return None

    async def answers(self) -> AsyncIterator[int]:
        """The task_id of each task as it is answered, until the process is gone."""
        while True:
            match message := await self._channel.receive():
                case messages.Done(task_id, report):
                    self._answer(task_id, report)
                    yield task_id
                case messages.Failed(task_id):
                    if message.detail:
                        _log.error("device %s: task %d failed\n%s", self._settings.name, task_id, message.detail)
                    self._answer(task_id, _error_of(message))
                    yield task_id
                case messages.Refused(words):
                    self._death = (Death.BROKEN, words)
                    return
                case messages.Ready() | None:
                    return

    def give(self, task: Task, blocks: Sequence[Block]) -> asyncio.Future[Report]:
        """Send a task, and the blocks that the process does not know yet; the future is done when it touches none."""
        for block in blocks:
            if block.block_id not in self._blocks:
                self._blocks.add(block.block_id)
                self._channel.send(messages.AddBlock(block), fd=block.fd)
        answer: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        self._tasks[task.task_id] = answer
        self._channel.send(messages.Run(task))
        return answer

    def cancel(self, task_id: int) -> None:
        """Ask the process to stop a task; its future is done when it has."""
        self._channel.send(messages.Cancel(task_id))

    def drop_block(self, block_id: int) -> None:
        """Let the process unmap a block; one that it does not know is nothing."""
        if block_id in self._blocks:
            self._blocks.discard(block_id)
            self._channel.send(messages.DropBlock(block_id))

    def end(self) -> None:
        """Ask the process to stop its tasks and end."""
        for task_id in self._tasks:
            self.cancel(task_id)
        self._channel.send(messages.Stop())

    def kill(self, death: Death, words: str) -> None:
        """End the process by force."""
        if self._death is None:
            self._death = (death, words)
        self._kill()

    async def bury(self) -> tuple[Death, str]:
        """End the process if it still runs, wait until nothing of it is left, fail its tasks, and say why it ended."""
        self._kill()
        # A closed socket does not mean a dead process, and its tasks may fail only when it cannot write any more.
        await settle(asyncio.ensure_future(self._process.wait()))
        self._channel.close()
        for answer in self._tasks.values():
            lost = errors.DeviceLost(
                f"the process of {self._settings.name} ended while it worked on this request; it can be sent again"
            )
            answer.set_exception(lost)
        self._tasks.clear()
        return self._death or _death_of(self._process.returncode)

    def _answer(self, task_id: int, answer: Report | errors.DqkvError) -> None:
        future = self._tasks.pop(task_id, None)
        if future is None:
            return
        if isinstance(answer, Report):
            future.set_result(answer)
        else:
            future.set_exception(answer)

    def _kill(self) -> None:
        if self._process.returncode is None:
            # Not its own kill(): that may take the exit status before asyncio's watcher, which then has none to tell.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


async def settle(future: asyncio.Future[Any], *, timeout_s: float | None = None) -> bool:
    """Wait until the future is done, however often the waiting task is cancelled; False when the time is over first.

    The caller has to go on with the cancellation.
    """
    loop = asyncio.get_running_loop()
    end = None if timeout_s is None else loop.time() + timeout_s
    while not future.done():
        left = None if end is None else end - loop.time()
        if left is not None and left <= 0:
            return False
        try:
            await asyncio.wait({future}, timeout=left)
        except asyncio.CancelledError:
            continue
    return True


def _error_of(failed: messages.Failed) -> errors.DqkvError:
    return errors.from_reason(failed.reason, failed.message, field=failed.field, retry_after_s=failed.retry_after_s)


def _death_of(returncode: int | None) -> tuple[Death, str]:
    if returncode is not None and returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return Death.SIGNAL, f"its process was ended by {name}"
    return Death.EXIT, f"its process ended by itself with status {returncode}"
