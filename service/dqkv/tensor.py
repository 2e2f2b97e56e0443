"""A tensor as the vocabulary knows it: element type, shape, strides, and where its bytes are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

import ml_dtypes
import numpy as np

from dqkv import errors

BYTES_LIMIT = 2**62
"""No size, stride or product of sizes reaches this, so that sums of a few never overflow 64 bits."""

D_co = TypeVar("D_co", covariant=True)
E = TypeVar("E")


class DType(StrEnum):
    """Element types of tensors."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FP32 else 2


NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.FP16: np.dtype(np.float16),
    DType.FP32: np.dtype(np.float32),
}
"""What numpy calls each, in this machine's byte order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor(Generic[D_co]):
    """One tensor: dtype, shape, strides in elements (0 allowed, never negative), and where its bytes are.

    Raises SizeOverflow and ShapeMismatch when shape and strides cannot be a tensor's.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    data: D_co

    def __post_init__(self) -> None:
        if len(self.strides) != len(self.shape):
            raise errors.ShapeMismatch(
                f"strides {self.strides} have {len(self.strides)} entries, shape {self.shape} has {len(self.shape)}",
                field="strides",
            )
        for name, values in (("shape", self.shape), ("strides", self.strides)):
            for value in values:
                if value < 0 or value >= BYTES_LIMIT:
                    raise errors.SizeOverflow(f"{name} {values}: {value} is not in [0, 2**62)", field=name)
        if math.prod(self.shape) * self.dtype.itemsize >= BYTES_LIMIT or self.extent_nbytes >= BYTES_LIMIT:
            raise errors.SizeOverflow(f"shape {self.shape} in {self.dtype} is larger than 2**62 bytes", field="shape")

    @staticmethod
    def dense(dtype: DType, shape: Sequence[int], data: E) -> Tensor[E]:
        """A row-major tensor without gaps."""
        return Tensor(dtype=dtype, shape=tuple(shape), strides=dense_strides(shape), data=data)

    def with_data(self, data: E) -> Tensor[E]:
        """The same tensor with its bytes elsewhere, strides kept."""
        return Tensor(dtype=self.dtype, shape=self.shape, strides=self.strides, data=data)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, each counted once for each index that reaches it."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def extent_nbytes(self) -> int:
        """Bytes from the first element's first byte to the last element's last byte; 0 when empty."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie row-major without gaps (strides of dimensions of size 1 do not matter)."""
        want = dense_strides(self.shape)
        pairs = zip(self.shape, self.strides, want, strict=True)
        return 0 in self.shape or all(size == 1 or have == wanted for size, have, wanted in pairs)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements of a tensor without gaps."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
