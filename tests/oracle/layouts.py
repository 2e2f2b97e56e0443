"""How a tensor lies in memory: the strides and offsets that callers are known to send."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PAD_COLUMNS = 344
"""Columns of a neighbour in one concatenated projection."""
ABSURD_STRIDE = 3331333
"""Strides of dimensions of size 1 mean nothing and may be anything."""


def contiguous(x: Tensor) -> Tensor:
    """Row-major without gaps."""
    return x.contiguous()


def heads_first(x: Tensor) -> Tensor:
    """Heads before rows in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def rows_first(x: Tensor) -> Tensor:
    """Rows before the batch, and only every second sequence is ours."""
    wide = x.new_zeros(x.shape[1], 2 * x.shape[0], *x.shape[2:])
    view = wide[:, ::2].transpose(0, 1)
    view.copy_(x)
    return view


def expanded(x: Tensor) -> Tensor:
    """One element seen everywhere: the gradient of a sum."""
    return x.reshape(-1)[:1].clone().reshape([1] * x.dim()).expand(x.shape)


def expanded_heads(x: Tensor) -> Tensor:
    """One head seen as all."""
    return x[..., :1, :].contiguous().expand(x.shape)


def slice_of_concatenation(x: Tensor) -> Tensor:
    """The first columns of wider rows."""
    columns = x.shape[-2] * x.shape[-1]
    wide = x.new_zeros(*x.shape[:-2], columns + PAD_COLUMNS)
    view = wide[..., :columns].view(x.shape)
    view.copy_(x)
    return view


def every_second_element(x: Tensor) -> Tensor:
    """A last stride of 2."""
    view = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])[..., ::2]
    view.copy_(x)
    return view


def off_by_one_element(x: Tensor) -> Tensor:
    """A base address that no vector load is aligned to."""
    buffer = x.new_zeros(x.numel() + 1)
    buffer[1:] = x.reshape(-1)
    return buffer[1:].view(x.shape)


def absurd_unit_strides(x: Tensor) -> Tensor:
    """Meaningless strides where a dimension has one element."""
    dense = x.contiguous()
    sizes = zip(dense.shape[:-1], dense.stride()[:-1], strict=True)
    strides = tuple(ABSURD_STRIDE if size == 1 else stride for size, stride in sizes)
    return dense.as_strided(dense.shape, (*strides, 1))


LAYOUTS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: contiguous,
    "bhsd": heads_first,
    "sbhd": rows_first,
    "expanded": expanded,
    "expanded_heads": expanded_heads,
    "cat_slice": slice_of_concatenation,
    "lastdim2": every_second_element,
    "offset1": off_by_one_element,
    "absurd1": absurd_unit_strides,
}
"""Each gives a tensor equal to the given one: (batch_size, seqlen, heads, width) or (rows, heads, width)."""

FUSED = "fused"
"""q, k and v are views of one projection; all three are laid out together."""


def fuse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as column ranges of one wide tensor."""
    wide = torch.cat([t.flatten(-2) for t in (q, k, v)], dim=-1)
    views, first = [], 0
    for t in (q, k, v):
        columns = t.shape[-2] * t.shape[-1]
        views.append(wide[..., first : first + columns].view(t.shape))
        first += columns
    return views[0], views[1], views[2]
