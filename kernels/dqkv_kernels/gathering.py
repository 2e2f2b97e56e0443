"""Rows of many sequences at once, out of tensors of any strides and back into them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class RowPlaces:
    """Where the rows of one side of a batch lie: `count` of each sequence, its own ones first.

    starts (flat over all rows of the tensor) and lengths are int64 (sequences,). The places behind a sequence's own
    rows name its last row again; those of a sequence without rows name any.
    """

    def __init__(self, starts: NDArray[np.int64], lengths: NDArray[np.int64], count: int, device: torch.device) -> None:
        step = np.arange(count)
        rows = starts[:, None] + np.minimum(step, np.maximum(lengths - 1, 0)[:, None])
        self.count = count
        self.is_own = torch.from_numpy(step < lengths[:, None]).to(device)
        self.is_padded = bool((lengths < count).any())
        self._rows = torch.from_numpy(rows.reshape(-1)).to(device)
        self._own_rows = torch.from_numpy(rows[step < lengths[:, None]]).to(device)

    def gather(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """(sequences, count, ...) of a tensor (rows, ...), or (batch_size, seqlen, ...) where it has one rank more."""
        flat = _flat(tensor, rank)
        found = tensor[self._split(self._rows, tensor)] if flat is None else flat.index_select(0, self._rows)
        return found.reshape(-1, self.count, *found.shape[1:])

    def put(self, tensor: torch.Tensor, rank: int, values: torch.Tensor) -> None:
        """Write values (sequences, count, ...) to the sequences' own rows of a tensor as `gather` takes it."""
        own = (values[self.is_own] if self.is_padded else values.flatten(0, 1)).to(tensor.dtype)
        flat = _flat(tensor, rank)
        if flat is None:
            tensor[self._split(self._own_rows, tensor)] = own
        else:
            flat.index_copy_(0, self._own_rows, own)

    def _split(self, rows: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.div(rows, tensor.shape[1], rounding_mode="floor"), rows % tensor.shape[1]


def _flat(tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """The tensor as (rows, ...), or None where that is no view: then rows are named by sequence and row."""
    if tensor.dim() == rank:
        return tensor
    return tensor.flatten(0, 1) if tensor.stride(0) == tensor.shape[1] * tensor.stride(1) else None
