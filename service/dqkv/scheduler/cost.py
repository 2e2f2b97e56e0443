"""What a problem costs: exact pairs and operations, and the seconds that a device is predicted to need for them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dqkv.problem import Arch, Problem, Rows, Window
from dqkv.tensor import DType

HEAD_DIM_BUCKETS = (64, 128, 256)
"""The tile shapes of the kernels change at these widths, and with them the rate."""

HEADS_A_SEQUENCE = 2
"""So many heads of a short sequence cost as much as the sequence itself: on a CPU core 1 us each, and 2 us.

That is in a job of many; a sequence in a job of its own costs hundreds more, which its operations mostly outweigh.
"""

DEFAULT_LAUNCH_S = 1e-3
DEFAULT_RATE = 1e10
"""Operations in a second of a slow CPU: what is assumed until a device was measured."""

EWMA_WEIGHT = 0.2
RATIO_LIMIT = 16.0
"""One measurement counts as at most this far off, so that a hiccup of the machine does not undo all before it."""


class Mask(StrEnum):
    """Kinds of masks with rates of their own: tiles are all full, full but for a diagonal, or cut on both sides."""

    FULL = "full"
    CAUSAL = "causal"
    WINDOW = "window"

    @staticmethod
    def of(window: Window) -> Mask:
        """The kind of a window."""
        if window.left is not None:
            return Mask.WINDOW
        if window.right is None:
            return Mask.FULL
        return Mask.CAUSAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """How much a problem asks of a device: pairs and operations over all heads, and what the rate depends on.

    head_dim is the bucket of the wider of head_dim and head_dim_v. Bytes count every tensor as if it were dense.
    sequences are those that have gradients at all: some row sees a key, or any row at all where there is a sink.
    """

    sequences: int
    heads: int
    pairs: int
    flops: float
    input_nbytes: int
    gradient_nbytes: int
    dtype: DType
    head_dim: int
    mask: Mask

    @staticmethod
    def of(problem: Problem[Any]) -> Work:
        """What a problem (any shapes) asks for."""
        shape = problem.shape
        seen = _visible_pairs(problem.rows, problem.options.window)
        pairs = shape.num_heads_q * int(seen.sum())
        flops = 2.0 * pairs * (3 * shape.head_dim + 2 * shape.head_dim_v)
        if problem.softmax_lse is None:
            flops += 2.0 * pairs * shape.head_dim
        width = max(shape.head_dim, shape.head_dim_v)
        return Work(
            sequences=int(np.count_nonzero(seen if problem.sink is None else problem.rows.q_len)),
            heads=shape.num_heads_q,
            pairs=pairs,
            flops=flops,
            input_nbytes=sum(tensor.nbytes for tensor in problem.tensors.values()),
            gradient_nbytes=sum(tensor.nbytes for tensor in problem.gradients.values()),
            dtype=problem.dtype,
            head_dim=next(bucket for bucket in HEAD_DIM_BUCKETS if width <= bucket),
            mask=Mask.of(problem.options.window),
        )

    @property
    def shares(self) -> float:
        """What sequences cost besides their operations, in sequences of one head."""
        return self.sequences * (HEADS_A_SEQUENCE + self.heads) / (HEADS_A_SEQUENCE + 1)


def visible_pairs(rows: Rows, window: Window) -> int:
    """How many query-key pairs of one head the mask leaves, over all sequences; exact."""
    return int(_visible_pairs(rows, window).sum())


def _visible_pairs(rows: Rows, window: Window) -> NDArray[np.int64]:
    """How many query-key pairs of one head the mask leaves in each sequence, int64 (batch_size,); exact.

    Row i of seqlen_q, with d = seqlen_k - seqlen_q, sees the keys from i + d - left to i + d + right, and those below
    sink_token_length that the left bound has passed. The keys up to the right bound are clip(i + d + right + 1, 0,
    seqlen_k); those of them that the left bound hides are clip(i + d + min(right + 1, -left), 0, seqlen_k), less the
    sink tokens among them. Each is a sum of a clipped line, which has a closed form.
    """
    queries, keys = rows.q_len, rows.k_len
    diagonal = keys - queries
    seen = queries * keys if window.right is None else _sum_of_clipped(queries, diagonal + (window.right + 1), keys)
    if window.left is not None:
        hidden_below = -window.left if window.right is None else min(window.right + 1, -window.left)
        hidden = _sum_of_clipped(queries, diagonal + hidden_below, keys)
        sinks = np.minimum(keys, window.sink_token_length)
        seen = seen - hidden + _sum_of_clipped(queries, diagonal + hidden_below, sinks)
    return seen


def _sum_of_clipped(count: NDArray[np.int64], first: NDArray[np.int64], top: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of clip(first + i, 0, top) for i in 0 to count - 1; all int64 (batch_size,).

    No product here reaches 2**63: counts and tops are below 2**31, and `first` is cut to where it still matters.
    """
    first = np.clip(first, -count, top)
    return _sum_below(first + count, top) - _sum_below(first, top)


def _sum_below(end: NDArray[np.int64], top: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of clip(t, 0, top) for all t < end."""
    rising: NDArray[np.int64] = np.clip(end, 0, top)
    level: NDArray[np.int64] = np.maximum(end - top, 0) * top
    return rising * (rising - 1) // 2 + level


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a request is predicted to cost, and where: pairs and operations over all heads, bytes, seconds.

    queue_s is the wait for `device`, device_s its work with kernels of `arch`.
    """

    pairs: int
    flops: float
    input_nbytes: int
    gradient_nbytes: int
    device_s: float
    queue_s: float
    device: str
    arch: Arch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measured run: what it was and how long the device took."""

    arch: Arch
    work: Work
    seconds: float


@dataclass(frozen=True, slots=True)
class _RateKey:
    arch: Arch
    dtype: DType
    mask: Mask
    head_dim: int

    def distance(self, other: _RateKey) -> tuple[bool, bool, bool, float]:
        """How unlike two keys are, the worst difference first."""
        widths = abs(math.log2(self.head_dim / other.head_dim))
        return self.arch is not other.arch, self.dtype is not other.dtype, self.mask is not other.mask, widths


class CostModel:
    """Predicts seconds of one device: a launch, shares for sequences and heads, and operations at their kind's rate.

    Kinds that were never measured take the rate of the most alike one; every finished run corrects what weighed most
    in its prediction by an exponentially weighted average of measured / predicted.
    """

    def __init__(self) -> None:
        self._launch_s = DEFAULT_LAUNCH_S
        self._sequence_s = 0.0
        self._rates: dict[_RateKey, float] = {}

    def fit(self, launch: Sample, sequences: Sample, rates: Iterable[Sample]) -> None:
        """Take launch time, the share of a sequence (of one head) and rates from small runs.

        `launch` is next to no work, `sequences` next to no work in many sequences, `rates` are work of each kind.
        """
        self._launch_s = max(launch.seconds, 1e-9)
        self._sequence_s = max(sequences.seconds - self._launch_s, 0.0) / sequences.work.shares
        for sample in rates:
            compute_s = max(sample.seconds - self._launch_s, 0.1 * sample.seconds, 1e-9)
            self._rates[_key(sample.arch, sample.work)] = sample.work.flops / compute_s

    def predict(self, arch: Arch, work: Work) -> float:
        """Seconds that the device will need."""
        return self._launch_s + work.shares * self._sequence_s + work.flops / self._rate(_key(arch, work))

    def observe(self, sample: Sample) -> None:
        """Correct what weighed most in the prediction by a run that finished."""
        key, work = _key(sample.arch, sample.work), sample.work
        compute_s, sequences_s = work.flops / self._rate(key), work.shares * self._sequence_s
        most = max(compute_s, sequences_s, self._launch_s)
        others_s = compute_s + sequences_s + self._launch_s - most
        correction = _correction(sample.seconds - others_s, most)
        if most == compute_s:
            self._rates[key] = self._rate(key) / correction
        elif most == sequences_s:
            self._sequence_s *= correction
        else:
            self._launch_s *= correction

    def _rate(self, key: _RateKey) -> float:
        rate = self._rates.get(key)
        if rate is None and self._rates:
            rate = self._rates[min(self._rates, key=key.distance)]
        return DEFAULT_RATE if rate is None else rate


def _key(arch: Arch, work: Work) -> _RateKey:
    return _RateKey(arch, work.dtype, work.mask, work.head_dim)


def _correction(measured_s: float, predicted_s: float) -> float:
    # A share of a short run can come out below nothing.
    ratio = max(measured_s, 0.0) / predicted_s
    return math.pow(min(max(ratio, 1.0 / RATIO_LIMIT), RATIO_LIMIT), EWMA_WEIGHT)
