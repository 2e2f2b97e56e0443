"""The vocabulary: what a request asks (`Problem`) and what answers it (`Gradients`); a value checks itself when built.

Nothing here touches a tensor's bytes: `Tensor.data` says where they are, in whatever way the layer that built the
value uses (an array, a slice of a region, a slot of staging memory), and is never looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dqkv import errors
from dqkv.tensor import BYTES_LIMIT, DType, Tensor

HEAD_DIM_MULTIPLE = 8
HEAD_DIM_LIMIT = 256
ROWS_LIMIT = 2**31 - 1
"""Offsets are int32 in every kernel of this kind, so no side has more rows."""
FLOAT32_MAX = 3.4028234663852886e38
SOFTCAP_MIN = 1e-30
"""A smaller softcap, or a logit divided by it, leaves float32: 0 / 0 and inf * 0 would make gradients NaN."""

INPUT_ROLES = ("q", "k", "v", "dout", "out", "delta", "softmax_lse", "dlse", "sink")
GRADIENT_ROLES = ("dq", "dk", "dv", "dsink")

D_co = TypeVar("D_co", covariant=True)
E = TypeVar("E")
T_co = TypeVar("T_co", covariant=True)


class Arch(StrEnum):
    """Families of kernels; AUTO leaves the choice to the server."""

    AUTO = "auto"
    CPU = "cpu"
    SM80 = "sm80"
    SM90 = "sm90"
    SM100 = "sm100"


class LseScope(StrEnum):
    """Over which keys softmax_lse (and out or delta) were taken: this request's, or more than this request's."""

    LOCAL = "local"
    GLOBAL = "global"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Which keys a query sees: key j when i + (seqlen_k - seqlen_q) - left <= j <= i + (seqlen_k - seqlen_q) + right.

    None is unbounded. Lengths are each sequence's used ones, so the window is aligned to the bottom-right corner.
    Offsets may be negative; an empty window is an empty window. Causal attention is `right=0`.
    The first `sink_token_length` keys of a sequence stay visible to queries whose left bound has passed them.
    Raises OptionInvalid.
    """

    left: int | None = None
    right: int | None = None
    sink_token_length: int = 0

    def __post_init__(self) -> None:
        for name, value in (("window.left", self.left), ("window.right", self.right)):
            if value is not None and not -BYTES_LIMIT < value < BYTES_LIMIT:
                raise errors.OptionInvalid(f"{name} is {value}, not within 2**62", field=name)
        if not 0 <= self.sink_token_length < BYTES_LIMIT:
            raise errors.OptionInvalid(
                f"sink_token_length is {self.sink_token_length}, below 0 or above 2**62",
                field="sink_token_length",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How the gradient is taken. Raises OptionInvalid.

    softmax_scale: None is head_dim ** -0.5. softcap: logits become softcap * tanh(logit / softcap) before the mask,
    0 is none, others are SOFTCAP_MIN or more. grad_dtype: None is the inputs' dtype; FP32 leaves sums that a caller
    adds up unrounded.
    """

    softmax_scale: float | None = None
    window: Window = field(default_factory=Window)
    softcap: float = 0.0
    deterministic: bool = False
    grad_dtype: DType | None = None
    arch: Arch = Arch.AUTO
    lse_scope: LseScope = LseScope.LOCAL

    def __post_init__(self) -> None:
        if self.softmax_scale is not None and not abs(self.softmax_scale) <= FLOAT32_MAX:
            raise errors.OptionInvalid(
                f"softmax_scale is {self.softmax_scale}, not a finite float32", field="softmax_scale"
            )
        if self.softcap != 0.0 and not SOFTCAP_MIN <= self.softcap <= FLOAT32_MAX:
            raise errors.OptionInvalid(
                f"softcap is {self.softcap}, must be 0 or from {SOFTCAP_MIN} to {FLOAT32_MAX}", field="softcap"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """How the rows of one side (queries or keys) are split into sequences.

    Without cu_seqlens the side is dense and every sequence has all its rows. With them it is packed: sequence b owns
    rows cu_seqlens[b] to cu_seqlens[b + 1], and rows behind the last offset belong to no sequence. seqused says how
    many of the allocated rows of each sequence count. max_seqlen is an upper bound, checked and otherwise unused.
    """

    cu_seqlens: tuple[int, ...] | None = None
    seqused: tuple[int, ...] | None = None
    max_seqlen: int | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the side is packed (rows, heads, head_dim) instead of dense (batch, rows, heads, head_dim)."""
        return self.cu_seqlens is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of a problem: rows_* count all rows in memory, seqlen_* those of the longest sequence."""

    batch_size: int
    rows_q: int
    rows_k: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads_q // self.num_heads_kv


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """For each sequence, its first row on both sides (flat, counted over the whole tensor) and how many rows count.

    Each is int64 of shape (batch_size,).
    """

    q_start: NDArray[np.int64]
    q_len: NDArray[np.int64]
    k_start: NDArray[np.int64]
    k_len: NDArray[np.int64]

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """(q_start, q_len, k_start, k_len) of each sequence."""
        columns = (self.q_start, self.q_len, self.k_start, self.k_len)
        return zip(*(column.tolist() for column in columns), strict=True)


@dataclass(frozen=True, kw_only=True)
class Problem(Generic[D_co]):
    """One backward of attention: the tensors, how they are split into sequences, and the options.

    Dense sides are (batch_size, seqlen, heads, head_dim), packed sides (rows, heads, head_dim); k and v are on one
    side, q, dout and out on the other. softmax_lse, delta and dlse are fp32 of (batch_size, num_heads_q, seqlen_q),
    or (num_heads_q, rows_q) where the queries are packed. sink is (num_heads_q,). Exactly one of out and delta is
    given. Raises the InvalidRequest of what does not fit, naming the field, its value and the limit.
    """

    q: Tensor[D_co]
    k: Tensor[D_co]
    v: Tensor[D_co]
    dout: Tensor[D_co]
    out: Tensor[D_co] | None = None
    delta: Tensor[D_co] | None = None
    softmax_lse: Tensor[D_co] | None = None
    dlse: Tensor[D_co] | None = None
    sink: Tensor[D_co] | None = None
    queries: Lengths = field(default_factory=Lengths)
    keys: Lengths = field(default_factory=Lengths)
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        _check_dtypes(self)
        _check_ranks(self)
        _check_head_dims(self)
        _check_heads(self)
        _check_batch(self)
        _check_shapes(self)
        _check_lengths(self, "q", self.queries)
        _check_lengths(self, "k", self.keys)
        _check_sources(self)

    @property
    def tensors(self) -> dict[str, Tensor[D_co]]:
        """The tensors that were given, by role, in the order of INPUT_ROLES."""
        given = ((role, getattr(self, role)) for role in INPUT_ROLES)
        return {role: tensor for role, tensor in given if tensor is not None}

    @property
    def dtype(self) -> DType:
        """The dtype of q, k, v, dout and out."""
        return self.q.dtype

    @property
    def softmax_scale(self) -> float:
        """The scale in force."""
        scale = self.options.softmax_scale
        return float(self.shape.head_dim) ** -0.5 if scale is None else scale

    @cached_property
    def shape(self) -> Shape:
        """The sizes, as one value."""
        batch_size, seqlen_q, rows_q = _side(self.q, self.queries)
        _, seqlen_k, rows_k = _side(self.k, self.keys)
        return Shape(
            batch_size=batch_size,
            rows_q=rows_q,
            rows_k=rows_k,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads_q=self.q.shape[-2],
            num_heads_kv=self.k.shape[-2],
            head_dim=self.q.shape[-1],
            head_dim_v=self.v.shape[-1],
        )

    @cached_property
    def rows(self) -> Rows:
        """Where each sequence lies on both sides, with seqused applied."""
        q_start, q_len = _starts_and_lengths(self.queries, self.shape.batch_size, self.shape.seqlen_q)
        k_start, k_len = _starts_and_lengths(self.keys, self.shape.batch_size, self.shape.seqlen_k)
        return Rows(q_start=q_start, q_len=q_len, k_start=k_start, k_len=k_len)

    @property
    def gradients(self) -> dict[str, Tensor[None]]:
        """What the answer holds, by role: dense tensors of the shapes of q, k, v (and sink) in the dtype asked for."""
        specs = {}
        for role, source in zip(GRADIENT_ROLES, (self.q, self.k, self.v, self.sink), strict=True):
            if source is not None:
                specs[role] = Tensor.dense(self.options.grad_dtype or source.dtype, source.shape, None)
        return specs

    def with_tensors(self, tensors: dict[str, Tensor[E]]) -> Problem[E]:
        """The same problem with other tensors for the same roles, for when their bytes moved."""
        return replace(self, **tensors)  # type: ignore[return-value,arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How an answer was made. Times in seconds.

    arch, kernel and device are what ran (not what was asked); softmax_lse_recomputed says that it was not given.
    queued_s waits for the device, transfer_s moves tensors, device_s computes, total_s is the server's whole time.
    """

    arch: str
    kernel: str
    device: str
    softmax_lse_recomputed: bool = False
    queued_s: float = 0.0
    transfer_s: float = 0.0
    device_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients(Generic[T_co]):
    """The answer: dq, dk, dv of the shapes of q, k, v, dsink of sink's where one was given, and how it was made."""

    dq: T_co
    dk: T_co
    dv: T_co
    dsink: T_co | None
    report: Report


def _side(tensor: Tensor[Any], lengths: Lengths) -> tuple[int, int, int]:
    """(batch_size, seqlen, rows) of one side; seqlen of a packed side is its longest sequence."""
    if lengths.cu_seqlens is None:
        return tensor.shape[0], tensor.shape[1], tensor.shape[0] * tensor.shape[1]
    offsets = np.asarray(lengths.cu_seqlens, dtype=np.int64)
    longest = int(np.diff(offsets).max(initial=0))
    return len(lengths.cu_seqlens) - 1, longest, tensor.shape[0]


def _starts_and_lengths(lengths: Lengths, batch_size: int, seqlen: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if lengths.cu_seqlens is None:
        starts = np.arange(batch_size, dtype=np.int64) * seqlen
        counts = np.full(batch_size, seqlen, dtype=np.int64)
    else:
        offsets = np.asarray(lengths.cu_seqlens, dtype=np.int64)
        starts, counts = offsets[:-1], offsets[1:] - offsets[:-1]
    if lengths.seqused is not None:
        counts = np.asarray(lengths.seqused, dtype=np.int64)
    return starts, counts


def _check_dtypes(problem: Problem[Any]) -> None:
    want = problem.q.dtype
    for role in ("k", "v", "dout", "out"):
        tensor = getattr(problem, role)
        if tensor is not None and tensor.dtype is not want:
            raise errors.DTypeMismatch(f"{role} is {tensor.dtype}, q is {want}: they must agree", field=role)
    for role in ("delta", "softmax_lse", "dlse"):
        tensor = getattr(problem, role)
        if tensor is not None and tensor.dtype is not DType.FP32:
            raise errors.DTypeMismatch(f"{role} is {tensor.dtype}, must be fp32", field=role)
    grad_dtype = problem.options.grad_dtype
    if grad_dtype not in (None, want, DType.FP32):
        raise errors.DTypeMismatch(
            f"grad_dtype is {grad_dtype}, must be the inputs' {want} or fp32", field="grad_dtype"
        )


def _check_ranks(problem: Problem[Any]) -> None:
    for roles, lengths, name in (
        (("q", "dout", "out"), problem.queries, "q"),
        (("k", "v"), problem.keys, "k"),
    ):
        rank = 3 if lengths.is_packed else 4
        for role in roles:
            tensor = getattr(problem, role)
            if tensor is not None and len(tensor.shape) != rank:
                raise errors.ShapeMismatch(
                    f"{role} has shape {tensor.shape}, must have {rank} dimensions "
                    f"({'with' if lengths.is_packed else 'without'} cu_seqlens_{name})",
                    field=role,
                )


def _check_head_dims(problem: Problem[Any]) -> None:
    for role, name in (("q", "head_dim"), ("v", "head_dim_v")):
        width = getattr(problem, role).shape[-1]
        if width % HEAD_DIM_MULTIPLE or not 0 < width <= HEAD_DIM_LIMIT:
            raise errors.HeadDimUnsupported(
                f"{name} ({role}'s last dimension) is {width}, must be a multiple of {HEAD_DIM_MULTIPLE} "
                f"from {HEAD_DIM_MULTIPLE} to {HEAD_DIM_LIMIT}",
                field=role,
            )


def _check_heads(problem: Problem[Any]) -> None:
    num_heads_q, num_heads_kv = problem.q.shape[-2], problem.k.shape[-2]
    if num_heads_q < 1 or num_heads_kv < 1 or num_heads_q % num_heads_kv:
        raise errors.HeadsNotDivisible(
            f"num_heads_q is {num_heads_q} (q), num_heads_kv is {num_heads_kv} (k): "
            "both must be at least 1 and the first a multiple of the second",
            field="q",
        )


def _check_batch(problem: Problem[Any]) -> None:
    counts = {}
    for role, tensor, lengths in (("q", problem.q, problem.queries), ("k", problem.k, problem.keys)):
        if lengths.cu_seqlens is None:
            counts[role] = tensor.shape[0]
            continue
        _check_range(f"cu_seqlens_{role}", lengths.cu_seqlens)
        counts[f"cu_seqlens_{role}"] = len(lengths.cu_seqlens) - 1
    (first, first_size), (second, second_size) = counts.items()
    if first_size == second_size:
        return
    if second == "k" and first == "q":
        raise errors.ShapeMismatch(f"k has batch_size {second_size}, q has {first_size}", field="k")
    blamed = second if second.startswith("cu_") else first
    raise errors.OffsetsInvalid(
        f"{first} says batch_size {first_size}, {second} says {second_size}: offsets must number batch_size + 1",
        field=blamed,
    )


def _check_shapes(problem: Problem[Any]) -> None:
    q, k, v = problem.q.shape, problem.k.shape, problem.v.shape
    heads = q[-2:-1]
    statistics = heads + q[:1] if problem.queries.is_packed else q[:1] + heads + q[1:2]
    wanted = {
        "k": (*v[:-1], q[-1]),
        "v": (*k[:-1], v[-1]),
        "dout": (*q[:-1], v[-1]),
        "out": (*q[:-1], v[-1]),
        "delta": statistics,
        "softmax_lse": statistics,
        "dlse": statistics,
        "sink": heads,
    }
    for role in ("k", "v", "dout", "out", "delta", "softmax_lse", "dlse", "sink"):
        tensor = getattr(problem, role)
        if role == "k" and k[-1] == q[-1]:
            continue
        if tensor is not None and tensor.shape != wanted[role]:
            raise errors.ShapeMismatch(f"{role} has shape {tensor.shape}, must be {wanted[role]}", field=role)
    for role, rows in (("q", problem.shape.rows_q), ("k", problem.shape.rows_k)):
        if rows > ROWS_LIMIT:
            raise errors.SizeOverflow(f"{role} has {rows} rows, the limit is {ROWS_LIMIT}", field=role)


def _check_lengths(problem: Problem[Any], side: str, lengths: Lengths) -> None:
    shape = problem.shape
    rows, seqlen = (shape.rows_q, shape.seqlen_q) if side == "q" else (shape.rows_k, shape.seqlen_k)
    if lengths.cu_seqlens is not None:
        _check_offsets(f"cu_seqlens_{side}", lengths.cu_seqlens, rows)
    if lengths.seqused is not None:
        _, allocated = _starts_and_lengths(replace(lengths, seqused=None), shape.batch_size, seqlen)
        _check_seqused(f"seqused_{side}", lengths.seqused, allocated)
    if lengths.max_seqlen is not None and lengths.max_seqlen > ROWS_LIMIT:
        raise errors.OptionInvalid(
            f"max_seqlen_{side} is {lengths.max_seqlen}, the limit is {ROWS_LIMIT}", field=f"max_seqlen_{side}"
        )
    if lengths.max_seqlen is not None and lengths.max_seqlen < seqlen:
        raise errors.MaxSeqlenTooSmall(
            f"max_seqlen_{side} is {lengths.max_seqlen}, the longest sequence has {seqlen} rows",
            field=f"max_seqlen_{side}",
        )


def _check_range(name: str, cu_seqlens: tuple[int, ...]) -> None:
    """Comes before the sizes are taken from the offsets, which are 64 bits wide there."""
    if not cu_seqlens:
        raise errors.OffsetsInvalid(f"{name} is empty, must hold batch_size + 1 offsets", field=name)
    if min(cu_seqlens) < 0 or max(cu_seqlens) > ROWS_LIMIT:
        raise errors.OffsetsInvalid(
            f"{name} holds {min(cu_seqlens)} to {max(cu_seqlens)}, must lie in 0 to {ROWS_LIMIT}", field=name
        )


def _check_offsets(name: str, cu_seqlens: tuple[int, ...], rows: int) -> None:
    if cu_seqlens[0] != 0:
        raise errors.OffsetsInvalid(f"{name} starts at {cu_seqlens[0]}, must start at 0", field=name)
    for index in range(1, len(cu_seqlens)):
        if cu_seqlens[index] < cu_seqlens[index - 1]:
            raise errors.OffsetsInvalid(
                f"{name} decreases from {cu_seqlens[index - 1]} to {cu_seqlens[index]} at index {index}",
                field=name,
            )
    if cu_seqlens[-1] > rows:
        raise errors.OffsetsInvalid(f"{name} ends at {cu_seqlens[-1]}, the tensor has {rows} rows", field=name)


def _check_seqused(name: str, seqused: tuple[int, ...], allocated: NDArray[np.int64]) -> None:
    if len(seqused) != len(allocated):
        raise errors.SequsedInvalid(
            f"{name} has {len(seqused)} entries, must have batch_size = {len(allocated)}", field=name
        )
    for index, (used, rows) in enumerate(zip(seqused, allocated.tolist(), strict=True)):
        if not 0 <= used <= rows:
            raise errors.SequsedInvalid(f"{name}[{index}] is {used}, must lie in 0 to {rows}", field=name)


def _check_sources(problem: Problem[Any]) -> None:
    if (problem.out is None) == (problem.delta is None):
        both = "neither was" if problem.out is None else "both were"
        raise errors.OutOrDelta(f"exactly one of out and delta must be given, {both}", field="out")
    if problem.options.lse_scope is LseScope.GLOBAL and problem.softmax_lse is None:
        raise errors.LseScopeInvalid(
            "lse_scope is GLOBAL, which needs the global softmax_lse; it was not given", field="softmax_lse"
        )
