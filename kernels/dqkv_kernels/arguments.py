"""How a caller's tensor becomes a kernel's argument: as it is, as another view of its memory, or copied.

Kernels take rows as (batches, rows, heads, width) in 16-byte vectors, and statistics as (batches, heads, rows); a
packed side is one batch. What a tensor's strides ask for is worked out once and remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from dqkv_kernels.workspace import ALIGNMENT_BYTES

STRIDES_KEPT = 64
"""Different strides of one tensor that are remembered: a caller has few, and more are no more than slow."""

STRIDE_LIMIT = 2**31
"""What a dimension of size 1 may say is between its elements, of which there are no two."""

_View = tuple[tuple[int, ...], tuple[int, ...]]


class _How(Enum):
    AS_IS = "as it is"
    AS_ONE_BATCH = "with a dimension before the others"
    COPIED = "copied"


@dataclass(kw_only=True)
class Argument:
    """One tensor of a problem's shape, with any strides. has_vectors: it holds rows, not statistics."""

    is_packed: bool
    has_vectors: bool
    _known: dict[tuple[int, ...], _How | _View] = field(default_factory=dict)

    def view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor as kernels take it, in its own memory; None where its strides or its address do not allow that."""
        strides = tensor.stride()
        how = self._known.get(strides)
        if how is None:
            if len(self._known) >= STRIDES_KEPT:
                self._known.clear()
            how = self._known[strides] = self._work_out(tensor)
        if how is _How.COPIED or (self.has_vectors and tensor.data_ptr() % ALIGNMENT_BYTES):
            return None
        if how is _How.AS_IS:
            return tensor
        return tensor[None] if how is _How.AS_ONE_BATCH else tensor.as_strided(*how)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as kernels read it: itself, or else a dense copy."""
        view = self.view(tensor)
        return self._shaped(tensor).clone(memory_format=torch.contiguous_format) if view is None else view

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where kernels write what belongs into the tensor: itself, or else dense zeros that are to be copied there."""
        view = self.view(tensor)
        if view is not None:
            return view
        return torch.zeros_like(self._shaped(tensor), memory_format=torch.contiguous_format)

    def _shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[None] if self.is_packed else tensor

    def _work_out(self, tensor: torch.Tensor) -> _How | _View:
        shaped = self._shaped(tensor)
        shape, strides = tuple(shaped.shape), shaped.stride()
        if self.has_vectors:
            vector = ALIGNMENT_BYTES // tensor.dtype.itemsize
            # a dimension of size 1 may carry any stride
            sized = tuple(0 if size == 1 else stride for size, stride in zip(shape[:-1], strides[:-1], strict=True))
            if any(stride % vector for stride in sized) or strides[-1] != 1 or not tensor.numel():
                return _How.COPIED
            odd = any(stride % vector for stride in strides[:-1])
            if odd or any(size == 1 and stride > STRIDE_LIMIT for size, stride in zip(shape, strides, strict=True)):
                return shape, (*sized, strides[-1])
        return _How.AS_ONE_BATCH if self.is_packed else _How.AS_IS
