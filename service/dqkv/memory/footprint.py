"""The bytes of a file that a strided tensor touches: its runs, and whether two tensors can be told apart by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from dqkv.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Footprint:
    """Runs of `run_nbytes` contiguous bytes: the first at `start`, the others along `dims`, outermost first.

    Each of `dims` is (size, stride in bytes), size > 1 and stride > 0; what lies without a gap was merged into the
    run. `expanded` says that some bytes are reached by more than one index (stride 0 over a size above 1).
    """

    start: int
    dims: tuple[tuple[int, int], ...]
    run_nbytes: int
    expanded: bool

    @staticmethod
    def of(tensor: Tensor[Any], byte_offset: int) -> Footprint:
        """The bytes of a tensor (any shape and strides) whose first element starts at byte_offset."""
        itemsize = tensor.dtype.itemsize
        if 0 in tensor.shape:
            return Footprint(byte_offset, (), 0, expanded=False)
        pairs = [
            (size, stride * itemsize) for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1
        ]
        run_nbytes = itemsize
        dims: list[tuple[int, int]] = []
        for size, stride in sorted((pair for pair in pairs if pair[1]), key=lambda pair: pair[1]):
            if not dims and stride == run_nbytes:
                run_nbytes *= size
            elif dims and stride == dims[-1][0] * dims[-1][1]:
                dims[-1] = (dims[-1][0] * size, dims[-1][1])
            else:
                dims.append((size, stride))
        return Footprint(
            byte_offset, tuple(reversed(dims)), run_nbytes, expanded=any(not stride for _, stride in pairs)
        )

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.start + self.run_nbytes + sum((size - 1) * stride for size, stride in self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        nbytes = self.run_nbytes
        for size, _ in self.dims:
            nbytes *= size
        return nbytes

    @property
    def is_exclusive(self) -> bool:
        """Whether each byte is provably reached by one index alone; every view of a dense tensor's part is."""
        reach = self.run_nbytes
        for size, stride in reversed(self.dims):
            if stride < reach:
                return False
            reach += (size - 1) * stride
        return not self.expanded

    def is_disjoint(self, other: Footprint) -> bool:
        """Whether the two provably share no byte; interleaved views of one fused tensor do not.

        Two tensors whose extents overlap are told apart by a period P among their strides: where every run of each
        lies, modulo P, in an interval of its own, no byte is shared. What no period tells apart counts as shared.
        """
        if not self.run_nbytes or not other.run_nbytes or self.end <= other.start or other.end <= self.start:
            return True
        periods = {stride for _, stride in (*self.dims, *other.dims)}
        return any(self._is_apart(other, period) for period in periods)

    def bases(self) -> Iterator[int]:
        """The start of each group of runs along the last of `dims`, in the order of memory."""
        for offsets in product(*(range(0, size * stride, stride) for size, stride in self.dims[:-1])):
            yield self.start + sum(offsets)

    def _is_apart(self, other: Footprint, period: int) -> bool:
        mine, others = self._width(period), other._width(period)
        distance = (other.start - self.start) % period
        return mine <= distance and others <= period - distance

    def _width(self, period: int) -> int:
        return self.run_nbytes + sum((size - 1) * stride for size, stride in self.dims if stride % period)
