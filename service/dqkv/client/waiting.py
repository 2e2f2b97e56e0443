"""How a client waits for calls: a blocking client on the thread that asked, an asynchronous one on its event loop.

The client is written once, as coroutines that wait by one of these. `OnThread` never suspends them, so that `finish`
runs them to their end on the spot: a blocking call then costs no change of threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import grpc

THREADS = 16
"""Streams of one asynchronous client at the same time; each holds a thread."""

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
Req = TypeVar("Req")
Resp = TypeVar("Resp")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnaryCall(Generic[Req, Resp]):
    """A call that can be made: the method, what it is sent, and how many seconds it may take."""

    method: grpc.UnaryUnaryMultiCallable[Req, Resp]
    request: Req
    timeout_s: float
    metadata: Metadata


class Waiting(Protocol):
    """A way to wait."""

    async def call(self, call: UnaryCall[Any, Resp]) -> Resp:
        """Makes a unary call; raises what grpcio raises."""

    async def work(self, run: Callable[[], T], cancel: Callable[[], None]) -> T:
        """Runs what blocks; where the waiting ends early, `cancel` is called and `run` has ended when this raises."""

    async def sleep(self, seconds: float) -> None:
        """Lets time pass."""

    async def close(self) -> None:
        """Ends the threads."""


class OnThread:
    """Waits on the thread that asks; for any number of them."""

    async def call(self, call: UnaryCall[Any, Resp]) -> Resp:
        """See Waiting."""
        return call.method(call.request, timeout=call.timeout_s, metadata=call.metadata)

    async def work(self, run: Callable[[], T], cancel: Callable[[], None]) -> T:
        """See Waiting; an interrupt of the thread ends `run` by itself."""
        del cancel
        return run()

    async def sleep(self, seconds: float) -> None:
        """See Waiting."""
        time.sleep(seconds)  # noqa: ASYNC251 (no loop runs this)

    async def close(self) -> None:
        """See Waiting; there are none."""


class OnLoop:
    """Waits on the running event loop; what blocks has threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dqkv-stream")

    async def call(self, call: UnaryCall[Any, Resp]) -> Resp:
        """See Waiting; cancelling the task cancels the call."""
        future = call.method.future(call.request, timeout=call.timeout_s, metadata=call.metadata)
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: grpc.Future[Resp]) -> None:
            # The loop may be closed by the time a call that nobody waits for any more ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        future.add_done_callback(wake)
        try:
            await done.wait()
        except asyncio.CancelledError:
            future.cancel()
            raise
        return future.result()

    async def work(self, run: Callable[[], T], cancel: Callable[[], None]) -> T:
        """See Waiting."""
        job = self._threads.submit(run)
        work = asyncio.wrap_future(job)
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancel()
            # What no thread has begun need not be waited for.
            job.cancel()
            while not work.done():
                # `run` may write into the caller's memory until it ends, however often its task is cancelled.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
            if not work.cancelled():
                # Its error is looked at, or asyncio prints that nobody did.
                work.exception()
            raise
        return work.result()

    async def sleep(self, seconds: float) -> None:
        """See Waiting."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """See Waiting."""
        await asyncio.to_thread(self._threads.shutdown)


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that waits by OnThread, and so never suspends, to its end."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("a blocking call tried to wait on an event loop")
