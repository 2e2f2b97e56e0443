"""A device as its own process: started, given tasks, watched, and started again when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from dqkv import errors
from dqkv.backend.base import DeviceState, Task
from dqkv.backend.life import Death, DeviceSettings, Life, settle
from dqkv.backend.standing import Backoff, Standing
from dqkv.memory.block import Block
from dqkv.problem import Report

__all__ = ["Backoff", "Death", "DeviceProcess", "DeviceSettings"]

_log = logging.getLogger(__name__)


class DeviceProcess(Standing):
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
        super().__init__(settings.name, on_restart=on_restart, backoff=backoff)
        self._settings = settings
        self._life: Life | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """The process that runs now, if one does."""
        return None if self._life is None else self._life.pid

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
            await asyncio.sleep(self._wait_s)

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
        self._fail(words, self._state)
