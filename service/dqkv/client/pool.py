"""Memory that a client shares with its server, lent out array by array and taken back when an array is gone."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dqkv.client.arrays import HostArray, dtype_of
from dqkv.client.regions import RegionTable, Registration
from dqkv.client.segment import Kind, aligned
from dqkv.problem import Problem
from dqkv.tensor import NUMPY_DTYPES, Tensor, dense_strides

REGION_NBYTES = 64 << 20
"""A region of the pool has at least this: small arrays share one, and a server counts regions, not bytes."""
LABEL = "pool"
INPUTS = ("q", "k", "v", "dout")
"""Where these lie in the pool, the gradients go there too."""


class Loan:
    """Who the memory of one array belongs to: numpy and torch keep it for as long as anything sees the array."""

    def __init__(self, memory: HostArray) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory


class Ground:
    """One region of the pool and what of it is free: (begin, end) in bytes, in order, none touching another."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self._free = [(0, registration.segment.nbytes)]

    def take(self, nbytes: int) -> int | None:
        """The begin of so many bytes that are nobody's, or None."""
        for place, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[place : place + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                return begin
        return None

    def give_back(self, begin: int, nbytes: int) -> None:
        """Takes in bytes that nobody sees any more."""
        self._free.append((begin, begin + nbytes))
        self._free.sort()
        joined: list[tuple[int, int]] = []
        for first, last in self._free:
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], last)
            else:
                joined.append((first, last))
        self._free = joined


class Pool:
    """The regions that a client made for `allocate`; any thread may use it."""

    def __init__(self, regions: RegionTable) -> None:
        self._regions = regions
        self._grounds: tuple[Ground, ...] = ()
        self._taking = threading.Lock()
        # Arrays go whenever the interpreter likes, also while this thread holds the lock.
        self._returned: deque[tuple[Ground, int, int]] = deque()

    async def allocate(self, shape: Sequence[int], dtype: Any) -> HostArray:
        """A numpy array of any content; see `AsyncClient.allocate`."""
        kind = dtype_of("dtype", dtype)
        tensor = Tensor(dtype=kind, shape=tuple(shape), strides=dense_strides(shape), data=None)
        nbytes = aligned(tensor.extent_nbytes)
        if not nbytes:
            return np.empty(tensor.shape, NUMPY_DTYPES[kind])
        found = self._take(nbytes)
        while found is None:
            # Memory is made outside the lock; another thread that runs short meanwhile makes some too.
            size = max(nbytes, REGION_NBYTES)
            ground = Ground(await self._regions.register(size, Kind.MEMFD, LABEL, 0.0))
            with self._taking:
                self._grounds = (*self._grounds, ground)
            found = self._take(nbytes)
        ground, begin = found
        loan = Loan(ground.registration.segment.memory(begin, tensor.extent_nbytes))
        weakref.finalize(loan, self._returned.append, (ground, begin, nbytes)).atexit = False
        return np.asarray(loan).view(NUMPY_DTYPES[kind]).reshape(tensor.shape)

    async def gradients(self, problem: Problem[HostArray], given: Mapping[str, HostArray]) -> dict[str, HostArray]:
        """Memory for the gradients of a problem that has none in `given`, where its inputs lie in the pool."""
        inputs = (problem.tensors[role].data for role in INPUTS)
        if not self._grounds or not all(map(self._holds, inputs)):
            return {}
        return {
            role: await self.allocate(wanted.shape, wanted.dtype)
            for role, wanted in problem.gradients.items()
            if role not in given
        }

    async def forget_lost(self) -> bool:
        """Lends no more of regions that the server has forgotten, as after a restart; whether there were any.

        What was lent of them is ordinary memory from then on, and travels like any other.
        """
        lost = await self._regions.forget_lost([ground.registration.handle for ground in self._grounds])
        with self._taking:
            self._grounds = tuple(ground for ground in self._grounds if ground.registration.handle not in lost)
        return bool(lost)

    def _holds(self, array: HostArray) -> bool:
        return any(ground.registration.segment.find(array, b"") is not None for ground in self._grounds)

    def _take(self, nbytes: int) -> tuple[Ground, int] | None:
        with self._taking:
            while self._returned:
                ground, begin, size = self._returned.popleft()
                ground.give_back(begin, size)
            for ground in self._grounds:
                at = ground.take(nbytes)
                if at is not None:
                    return ground, at
        return None
