"""A device as its own process: started, given tasks, watched, and started again when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dqkv import errors
from dqkv.backend.base import DeviceInfo, DeviceState, Task
from dqkv.backend.life import Death, DeviceSettings, Life, settle
from dqkv.memory.block import Block
from dqkv.problem import Report

__all__ = ["Backoff", "Death", "DeviceProcess", "DeviceSettings"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """How long to wait before a process is started again, in seconds.

    The wait doubles from `initial_s` to `limit_s` with each death since a task was last answered. After `starts_limit`
    starts in a row that failed the device is LOST, and is tried again every `lost_s`.
    """

    initial_s: float = 0.1
    limit_s: float = 30.0
    starts_limit: int = 5
    lost_s: float = 60.0

    def wait_s(self, *, deaths: int, failed_starts: int) -> float:
        """Seconds to wait after that many deaths, and that many failed starts, in a row."""
        if failed_starts >= self.starts_limit:
            return self.lost_s
        return min(self.initial_s * 2.0 ** min(max(deaths - 1, 0), 60), self.limit_s)


class DeviceProcess:
    """A `Device` whose work is done by a process of its own.

    `on_restart(name, death)` is called for each death that is followed by another start.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        *,
        on_restart: Callable[[str, Death], None],
        backoff: Backoff | None = None,
    ) -> None:
        self._settings = settings
        self._backoff = backoff or Backoff()
        self._on_restart = on_restart
        self._on_change: Callable[[], None] = lambda: None
        self._state = DeviceState.STARTING
        self._info: DeviceInfo | None = None
        self._fault = ""
        self._deaths = 0
        self._failed_starts = 0
        self._life: Life | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def name(self) -> str:
        """Such as "cpu:0"."""
        return self._settings.name

    @property
    def state(self) -> DeviceState:
        """STARTING until its process is ready, and again after a death; LOST when it does not start."""
        return self._state

    @property
    def info(self) -> DeviceInfo | None:
        """What it can do; None until it was ready once."""
        return self._info

    @property
    def fault(self) -> str:
        """Why it takes no work, in words; "" when it does, or has only not started yet."""
        return self._fault

    @property
    def pid(self) -> int | None:
        """The process that runs now, if one does."""
        return None if self._life is None else self._life.pid

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` after every change of `state` or `fault`."""
        self._on_change = on_change

    async def start(self) -> None:
        """Begin to start the process, and return before it is ready."""
        if self._supervisor is None:
            self._stopping = False
            self._supervisor = asyncio.create_task(self._supervise(), name=f"dqkv device {self.name}")

    async def stop(self) -> None:
        """End the process: soon when it is idle or gives up its task, by force when it has not started or will not."""
        self._stopping = True
        if self._supervisor is None:
            return
        if self._life is None or self._state is not DeviceState.OK:
            # Nothing runs on it yet, and it hears nothing until it has imported what it needs.
            self._supervisor.cancel()
        else:
            self._life.end()
        if not await settle(self._supervisor, timeout_s=self._settings.stop_timeout_s):
            self._supervisor.cancel()
            await settle(self._supervisor)
        self._supervisor = None
        self._become(DeviceState.LOST, "it was stopped")

    def drop_block(self, block_id: int) -> None:
        """Let the process unmap a block that no task in flight names; an unknown one is nothing."""
        if self._life is not None:
            self._life.drop_block(block_id)

    async def run(self, task: Task, blocks: Sequence[Block]) -> Report:
        """Do a task whose tensors lie in `blocks`.

        It returns, raises or ends by cancellation only when nothing on the device touches the blocks any more: a
        cancelled task has answered, or its process is dead.
        Raises DeviceLost when the device is not OK or dies meanwhile, and the DqkvError that the device answered.
        """
        life = self._life
        if life is None or self._state is not DeviceState.OK:
            raise errors.DeviceLost(f"{self.name} takes no work: {self._fault or 'it is starting'}")
        answer = life.give(task, blocks)
        try:
            await asyncio.wait({answer})
        except asyncio.CancelledError:
            life.cancel(task.task_id)
            if not await settle(answer, timeout_s=self._settings.cancel_timeout_s):
                words = f"a cancelled task was not given up within {self._settings.cancel_timeout_s:g} s"
                life.kill(Death.STUCK, words)
                await settle(answer)
            answer.exception()  # taken here, for nobody else will
            raise
        return answer.result()

    async def _supervise(self) -> None:
        while True:
            try:
                death = await self._live()
            except Exception:  # noqa: BLE001 - the device must not stay down for it
                # Its process is dead and buried, whatever it was.
                _log.exception("device %s: watching its process failed", self.name)
                death = Death.EXIT
            supervisor = asyncio.current_task()
            if self._stopping or (supervisor is not None and supervisor.cancelling()):
                # A cancellation that came during a burial waited for its end.
                return
            self._on_restart(self.name, death)
            await asyncio.sleep(self._backoff.wait_s(deaths=self._deaths, failed_starts=self._failed_starts))

    async def _live(self) -> Death:
        """One process from its start to its death; nothing of it is left when this returns or raises."""
        try:
            self._life = life = await Life.begin(self._settings)
        except OSError as error:
            self._mourn(f"its process could not be started: {error.strerror}", was_ready=False)
            return Death.NOT_READY
        info = None
        try:
            info = await life.until_ready()
            if info is not None:
                self._info, self._failed_starts = info, 0
                self._become(DeviceState.OK, "")
                async for _ in life.answers():
                    self._deaths = 0
        finally:
            if self._state is DeviceState.OK:
                # Before its burial, so that nobody gives it a task that it will never see.
                self._become(DeviceState.STARTING, "its process ended")
            death, words = await life.bury()
            self._life = None
            self._mourn(words, was_ready=info is not None)
        return death

    def _mourn(self, words: str, *, was_ready: bool) -> None:
        self._deaths += 1
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        if self._stopping:
            return
        _log.warning("device %s: %s", self.name, words)
        if self._failed_starts >= self._backoff.starts_limit:
            self._become(DeviceState.LOST, f"it failed to start {self._failed_starts} times in a row: {words}")
        else:
            self._become(self._state, words)

    def _become(self, state: DeviceState, fault: str) -> None:
        if (state, fault) != (self._state, self._fault):
            self._state, self._fault = state, fault
            self._on_change()
