"""The client: one implementation as coroutines, waited for on an event loop or on the thread that asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, TypeVar, Unpack

from dqkv import errors
from dqkv.client.arrays import Array, HostArray, of_kind
from dqkv.client.call import Call
from dqkv.client.capabilities import Capabilities, Estimate, Health, estimate_of
from dqkv.client.connection import CONTROL_TIMEOUT_S, Connection
from dqkv.client.endpoint import Endpoint, Tls
from dqkv.client.outputs import check_outputs
from dqkv.client.pool import Pool
from dqkv.client.regions import AsyncRegion, OpeningRegion, Region, RegionTable
from dqkv.client.request import BACKWARD_ARGUMENTS, Given, Request, choice, known_only, number, seconds
from dqkv.client.retry import Retry
from dqkv.client.segment import Kind
from dqkv.client.waiting import OnLoop, OnThread, Waiting, finish
from dqkv.codec import encode_outline
from dqkv.problem import Gradients, Problem
from dqkv.v1 import gradient_pb2 as pb

TIMEOUT_S = 300.0
"""Longest wait for gradients where the caller names none."""

UNANSWERED = (errors.WontFinish, errors.TransportError, errors.Cancelled)
"""Errors after which the server may still be at work on the request."""

T = TypeVar("T")


class AsyncClient:
    """Asks one server for gradients; belongs to the event loop it is first used on.

    address: "host:port", "[::1]:port" or "unix:/path". tls: None is none. token: sent as a bearer token with every
    call. timeout_s: the longest wait where a call names none, 0 or more; infinity is as long as it takes. retry: what
    is sent again, and when. inline_nbytes: what has more bytes, one way or the other, is streamed; None is the
    server's own limit.
    Raises OptionInvalid for an address, files or a time that cannot be used. Nothing is sent before the first call.
    """

    _wait_by: ClassVar[type[OnLoop | OnThread]] = OnLoop

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retry: Retry | None = None,
        inline_nbytes: int | None = None,
    ) -> None:
        self._waiting: Waiting = self._wait_by()
        self._connection = Connection(Endpoint(address=address, tls=tls, token=token), self._waiting)
        self._regions = RegionTable(self._connection, self._waiting)
        self._pool = Pool(self._regions)
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._retry = Retry() if retry is None else retry
        self._inline_nbytes = inline_nbytes

    async def backward(
        self, q: Array, k: Array, v: Array, dout: Array, *, timeout_s: float | None = None, **given: Unpack[Given]
    ) -> Gradients[Array]:
        """The gradients dq, dk, dv (and dsink, where a sink is given) of attention.

        q (batch_size, seqlen_q, num_heads_q, head_dim), k (batch_size, seqlen_k, num_heads_kv, head_dim),
        v (..., head_dim_v), dout like q with head_dim_v; packed sides have (rows, heads, width). numpy arrays (bf16
        is ml_dtypes.bfloat16) or torch tensors on any device; the answer is of q's kind. `dqkv.client.request.Given`
        is the table of everything else. What lies in an open region of this client is read, and written, there.
        timeout_s: seconds until WontFinish, 0 or more; None is the client's, infinity as long as it takes.

        Raises an InvalidRequest before anything is sent when the arguments do not fit, later the server's typed
        errors (`dqkv.errors`), or TransportError when no answer came.
        """
        known_only("backward", given, BACKWARD_ARGUMENTS)
        request = Request(q=q, k=k, v=v, dout=dout, **given)
        problem = request.problem()
        return request.answer(await self.submit(problem, request.outputs(problem), timeout_s=timeout_s))

    async def submit(
        self,
        problem: Problem[HostArray],
        outputs: Mapping[str, HostArray] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Gradients[HostArray]:
        """The gradients of a problem over numpy arrays, written into `outputs` by role where given; see `backward`."""
        outputs = outputs or {}
        check_outputs(problem, outputs)
        outputs = {**outputs, **await self._pool.gradients(problem, outputs)}
        wait_s = self._timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + wait_s
        try:
            return await self._submit(problem, outputs, deadline)
        except (errors.RegionUnknown, errors.RegionLeaseExpired):
            # Refused before anything ran. A region of the pool is nobody's to open again but ours.
            if not await self._pool.forget_lost():
                raise
        return await self._submit(problem, outputs, deadline)

    async def _submit(
        self, problem: Problem[HostArray], outputs: Mapping[str, HostArray], deadline: float
    ) -> Gradients[HostArray]:
        call = Call(problem, outputs, self._regions.find)
        try:
            return await self._retry.run(
                lambda: self._attempt(call, deadline),
                deadline=deadline,
                writes_region=call.writes_region,
                sleep=self._waiting.sleep,
                before_retry=self._connection.forget,
            )
        except BaseException as error:
            answered = isinstance(error, errors.DqkvError) and not isinstance(error, UNANSWERED)
            if call.writes_region and not answered:
                # The server learns a moment later that nobody waits any more, and writes until then.
                await self._regions.until_unused(call.written)
            raise

    async def estimate(self, problem: Problem[Any]) -> Estimate:
        """What the problem would cost here and now; its tensors need no bytes. Raises what `backward` raises."""
        request = pb.EstimateRequest(problem=encode_outline(problem))
        return estimate_of(await self._ask(self._connection.gradients.Estimate, request))

    async def capabilities(self) -> Capabilities:
        """What the server says of itself now: version, devices, limits. Raises TransportError, Unauthenticated."""
        return await self._connection.capabilities(self._control_deadline(), fresh=True)

    async def health(self) -> Health:
        """The whole server's health. Raises TransportError when it cannot be reached."""
        return await self._connection.health(self._control_deadline())

    def region(
        self, nbytes: int, *, kind: Kind | str = Kind.MEMFD, label: str = "", lease_s: float = 0.0
    ) -> OpeningRegion:
        """Shared memory of `nbytes` with a server on this machine, which it reads and writes without copies over gRPC.

        To be awaited, or entered with `async with`. kind: "memfd" goes over the server's region socket, "posix" by
        name. lease_s: seconds that the region outlives this process; 0 is the server's default. Raises RegionInvalid
        when the memory cannot be had (more than the machine has left, say) or the server does not see it,
        QuotaRegions when there are too many.
        """
        return OpeningRegion(self._open_region(nbytes, kind, label, lease_s))

    async def allocate(self, shape: Sequence[int], dtype: Any) -> Array:
        """An array of any content in memory that the server sees too: to compute into, and to send without a copy.

        A torch dtype gives a torch tensor on the CPU; a numpy dtype or a name ("bf16", "fp16", "fp32") a numpy array.
        The memory comes from a pool of memfd regions of this client, and goes back when nothing sees the array any
        more: a training loop that allocates the same each step takes the same memory. Where q, k, v and dout lie in
        it, gradients that were given no memory lie in it as well. Raises what `region` raises, DTypeMismatch,
        ShapeMismatch, SizeOverflow.
        """
        return of_kind(dtype, await self._pool.allocate(shape, dtype))

    async def close(self) -> None:
        """Ends the regions and the connection; requests in flight are cancelled."""
        await self._regions.close()
        await self._connection.close()

    async def _open_region(self, nbytes: int, kind: Kind | str, label: str, lease_s: float) -> AsyncRegion:
        lease_s = number("lease_s", lease_s)
        registration = await self._regions.register(nbytes, choice("kind", Kind, kind), label, lease_s)
        return AsyncRegion(registration.segment, label, lambda: self._regions.release(registration))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _attempt(self, call: Call, deadline: float) -> Gradients[HostArray]:
        limit = self._inline_nbytes
        if limit is None:
            limit = (await self._connection.capabilities(deadline)).limits.inline_nbytes
        return await call.attempt(self._connection, deadline, inline_nbytes=limit)

    async def _ask(self, method: Any, request: Any) -> Any:
        deadline = self._control_deadline()
        await self._connection.capabilities(deadline)
        return await self._connection.call(method, request, deadline)

    def _control_deadline(self) -> float:
        """Until when an answer that holds no tensors is waited for."""
        return time.monotonic() + min(CONTROL_TIMEOUT_S, self._timeout_s)


class _ClientOnThread(AsyncClient):
    """An AsyncClient whose coroutines never suspend."""

    _wait_by = OnThread


class Client:
    """AsyncClient's blocking face, for any number of threads: the arguments, answers and errors are the same."""

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retry: Retry | None = None,
        inline_nbytes: int | None = None,
    ) -> None:
        self._client = _ClientOnThread(
            address, tls=tls, token=token, timeout_s=timeout_s, retry=retry, inline_nbytes=inline_nbytes
        )
        self._closed = False

    def backward(
        self, q: Array, k: Array, v: Array, dout: Array, *, timeout_s: float | None = None, **given: Unpack[Given]
    ) -> Gradients[Array]:
        """The gradients of attention; see AsyncClient.backward for shapes and errors."""
        known_only("backward", given, BACKWARD_ARGUMENTS)
        request = Request(q=q, k=k, v=v, dout=dout, **given)
        problem = request.problem()
        return request.answer(self.submit(problem, request.outputs(problem), timeout_s=timeout_s))

    def submit(
        self,
        problem: Problem[HostArray],
        outputs: Mapping[str, HostArray] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Gradients[HostArray]:
        """The gradients of a problem over numpy arrays; see AsyncClient.submit."""
        return self._run(lambda: self._client.submit(problem, outputs, timeout_s=timeout_s))

    def estimate(self, problem: Problem[Any]) -> Estimate:
        """What the problem would cost here and now; see AsyncClient.estimate."""
        return self._run(lambda: self._client.estimate(problem))

    def capabilities(self) -> Capabilities:
        """What the server says of itself now; see AsyncClient.capabilities."""
        return self._run(self._client.capabilities)

    def health(self) -> Health:
        """The whole server's health; see AsyncClient.health."""
        return self._run(self._client.health)

    def region(self, nbytes: int, *, kind: Kind | str = Kind.MEMFD, label: str = "", lease_s: float = 0.0) -> Region:
        """Shared memory of `nbytes` with a server on this machine; see AsyncClient.region."""
        opened = self._run(lambda: self._client._open_region(nbytes, kind, label, lease_s))
        return Region(opened.segment, label, lambda: None if self._closed else self._run(opened.close))

    def allocate(self, shape: Sequence[int], dtype: Any) -> Array:
        """An array in memory that the server sees too, from this client's pool; see AsyncClient.allocate."""
        return self._run(lambda: self._client.allocate(shape, dtype))

    def close(self) -> None:
        """Ends the regions and the connection; requests on other threads are cancelled. Twice is once."""
        if not self._closed:
            self._run(self._client.close)
            self._closed = True

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._closed:
            raise errors.OptionInvalid("this client is closed", field="client")
        return finish(begin())
