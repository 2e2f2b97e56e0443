"""Threads that each compute single-threaded: how often a sum is split never depends on how many there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Protocol

import torch

from dqkv import errors


class Job(Protocol):
    """Work that one thread does from start to end."""

    def __call__(self, crew: Crew) -> None:
        """Do the work; call `crew.check` between tiles."""


class Turns:
    """Whose turn it is among jobs that must do something in their order: the number of those that did."""

    def __init__(self) -> None:
        self.done = 0


class Crew:
    """The threads of one call: they stop together at the first error, and take turns where order matters."""

    def __init__(self, should_stop: Callable[[], object] | None) -> None:
        self._should_stop = should_stop
        self._condition = threading.Condition()
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise when the caller wants to stop (errors.Cancelled, or what should_stop raised) or another job failed."""
        if self._error is not None:
            raise errors.Cancelled("another part of this computation failed")
        if self._should_stop is not None and self._should_stop():
            raise errors.Cancelled("the computation was cancelled")

    def in_turn(self, turns: Turns, number: int, action: Callable[[], None]) -> None:
        """Run action once all lower numbers of the turns ran; jobs that share turns must be started in that order."""
        with self._condition:
            self._condition.wait_for(lambda: self._error is not None or turns.done == number)
        self.check()
        action()
        with self._condition:
            turns.done = number + 1
            self._condition.notify_all()

    def run(self, jobs: Iterable[Job], device: torch.device) -> None:
        """Do all jobs, started in order and each asked for no sooner than a thread is free for it.

        On a CPU they are done in as many threads as torch is set to use. Raises the first error.
        """
        queue = iter(jobs)
        if device.type != "cpu":
            for job in queue:
                self.check()
                job(self)
            return
        first = list(islice(queue, torch.get_num_threads()))
        self._run_threads(chain(first, queue), len(first))

    def _run_threads(self, queue: Iterator[Job], count: int) -> None:
        ready = threading.Barrier(count + 1)
        threads = [threading.Thread(target=self._work, args=(queue, ready), daemon=True) for _ in range(count)]
        torch_threads = torch.get_num_threads()
        try:
            for thread in threads:
                thread.start()
            ready.wait()
        except BaseException:
            # Threads that did start would wait for those that cannot.
            ready.abort()
            raise
        finally:
            # A thread's own setting is also the default of threads that start later: put it back at once.
            torch.set_num_threads(torch_threads)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self, queue: Iterator[Job], ready: threading.Barrier) -> None:
        # Asking first makes torch take its default now; taken later, it would undo the setting of this thread.
        torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            ready.wait()
            with torch.no_grad():
                while (job := self._next(queue)) is not None:
                    self.check()
                    job(self)
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread, which raises it
            with self._condition:
                self._error = self._error or error
                self._condition.notify_all()

    def _next(self, queue: Iterator[Job]) -> Job | None:
        with self._condition:
            return next(queue, None)
