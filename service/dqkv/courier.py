"""Sends one problem by a chosen transport: in a message, in a stream, or through shared memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType

from dqkv import errors
from dqkv.client.arrays import HostArray
from dqkv.client.client import Client
from dqkv.client.endpoint import Tls
from dqkv.client.regions import Region
from dqkv.client.segment import Kind, aligned
from dqkv.problem import Gradients, Problem
from dqkv.tensor import Tensor


class Transport(StrEnum):
    """How a problem's tensors travel."""

    UNARY = "unary"
    STREAM = "stream"
    REGION = "region"


@dataclass(frozen=True, kw_only=True)
class Door:
    """How to reach a server: address, TLS (None is none), token (None is none), and seconds to wait for gradients."""

    address: str
    tls: Tls | None = None
    token: str | None = None
    timeout_s: float = 120.0

    def client(self, inline_nbytes: int | None = None) -> Client:
        """A client of its own."""
        return Client(
            self.address, tls=self.tls, token=self.token, timeout_s=self.timeout_s, inline_nbytes=inline_nbytes
        )


class Courier:
    """Two clients of one server: one that sends messages and regions, one that streams whatever the size."""

    def __init__(self, door: Door) -> None:
        self._held = ExitStack()
        self.client = self._held.enter_context(door.client())
        self._streaming = self._held.enter_context(door.client(inline_nbytes=-1))

    def __enter__(self) -> Courier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def load(self, problem: Problem[HostArray], transport: Transport) -> Load:
        """Makes a problem ready to be sent, more than once if need be; the load has to be closed.

        Raises RegionInvalid when the transport is REGION and the server shares no memory with us.
        """
        match transport:
            case Transport.UNARY:
                return Load(self.client, problem, {}, None)
            case Transport.STREAM:
                return Load(self._streaming, problem, {}, None)
            case Transport.REGION:
                region = _region(self.client, problem)
                placed, outputs = _place(region, problem)
                return Load(self.client, placed, outputs, region)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Gradients, and the seconds between asking and having them."""

    gradients: Gradients[HostArray]
    round_trip_s: float


class Load:
    """A problem that is ready to be sent."""

    def __init__(
        self,
        client: Client,
        problem: Problem[HostArray],
        outputs: Mapping[str, HostArray],
        region: Region | None,
    ) -> None:
        self._client = client
        self._problem = problem
        self._outputs = outputs
        self._region = region

    def send(self) -> Answer:
        """Its gradients; those of a region are valid until close. Raises what Client.submit raises."""
        began = time.perf_counter()
        gradients = self._client.submit(self._problem, self._outputs)
        return Answer(gradients=gradients, round_trip_s=time.perf_counter() - began)

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._region is not None:
            self._region.close()


def _region(client: Client, problem: Problem[HostArray]) -> Region:
    tensors = [*problem.tensors.values(), *problem.gradients.values()]
    nbytes = max(sum(aligned(tensor.nbytes) for tensor in tensors), 1)
    try:
        return client.region(nbytes, kind=Kind.MEMFD)
    except errors.RegionInvalid:
        return client.region(nbytes, kind=Kind.POSIX)


def _place(region: Region, problem: Problem[HostArray]) -> tuple[Problem[HostArray], dict[str, HostArray]]:
    inputs = dict[str, Tensor[HostArray]]()
    for role, tensor in problem.tensors.items():
        view = region.tensor(tensor.shape, tensor.dtype)
        view[...] = tensor.data
        inputs[role] = tensor.with_data(view)
    outputs = {role: region.tensor(wanted.shape, wanted.dtype) for role, wanted in problem.gradients.items()}
    return problem.with_tensors(inputs), outputs
