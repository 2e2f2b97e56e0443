"""How a device stands, as the scheduler sees it: what supervises the device says, whoever watches is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dqkv.backend.base import DeviceInfo, DeviceState
from dqkv.backend.life import Death


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """How long to wait before a device is started again, in seconds.

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


class Standing:
    """What devices that are supervised have in common: state, fault, and how often they died and failed to start.

    `on_restart(name, death)` is called by the subclass for each death that is followed by another start.
    """

    def __init__(self, name: str, *, on_restart: Callable[[str, Death], None], backoff: Backoff | None = None) -> None:
        self._name = name
        self._on_restart = on_restart
        self._backoff = backoff or Backoff()
        self._on_change: Callable[[], None] = lambda: None
        self._state = DeviceState.STARTING
        self._info: DeviceInfo | None = None
        self._fault = ""
        self._deaths = 0
        self._failed_starts = 0

    @property
    def name(self) -> str:
        """Such as "cpu:0"."""
        return self._name

    @property
    def state(self) -> DeviceState:
        """STARTING until it is ready, and again when it is lost; LOST when it does not start."""
        return self._state

    @property
    def info(self) -> DeviceInfo | None:
        """What it can do; None until it was ready once."""
        return self._info

    @property
    def fault(self) -> str:
        """Why it takes no work, in words; "" when it does, or has only not started yet."""
        return self._fault

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` after every change of `state` or `fault`."""
        self._on_change = on_change

    @property
    def _wait_s(self) -> float:
        return self._backoff.wait_s(deaths=self._deaths, failed_starts=self._failed_starts)

    def _fail(self, words: str, state: DeviceState) -> None:
        """Says why it is down: LOST after too many failed starts in a row, else `state`."""
        if self._failed_starts >= self._backoff.starts_limit:
            self._become(DeviceState.LOST, f"it failed to start {self._failed_starts} times in a row: {words}")
        else:
            self._become(state, words)

    def _become(self, state: DeviceState, fault: str) -> None:
        if (state, fault) != (self._state, self._fault):
            self._state, self._fault = state, fault
            self._on_change()
