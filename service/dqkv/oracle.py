"""What the gradients must be: attention and its backward written out in numpy, in float64 and as an eager program.

It shares no code with what the server runs. The scores of a sequence exist whole, so it is for small problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dqkv.problem import GRADIENT_ROLES, Problem
from dqkv.tensor import NUMPY_DTYPES, DType

Array: TypeAlias = NDArray[Any]

EPSILON = {DType.BF16: 2.0**-8, DType.FP16: 2.0**-11, DType.FP32: 2.0**-20}
"""Relative spacing of the 16-bit dtypes; for fp32 what its accumulation leaves, not its spacing."""
EAGER_MULTIPLE = 3.0
"""Another order of summation errs by at most this multiple of the eager program's error."""
CANCELLATION = 2.0**-20
"""What fp32 accumulation leaves, relative to the terms, where the exact sum cancels."""
FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Attention's own results in flat rows: out (rows_q, num_heads_q, head_dim_v), lse (rows_q, num_heads_q)."""

    out: Array
    lse: Array


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The exact gradients by role, in the shapes of the problem, and the error that each may have (maximum norm).

    zero: rows of dq, dk, dv that must be exactly 0, because they see, or are seen by, nothing: bool, flat.
    """

    gradients: Mapping[str, Array]
    budget: Mapping[str, float]
    zero: Mapping[str, Array]


def forward(problem: Problem[Array]) -> Forward:
    """Attention in float64; rows that see no key, or belong to no sequence, have out 0 and lse -inf (or the sink)."""
    shape = problem.shape
    out = np.zeros((shape.rows_q, shape.num_heads_q, shape.head_dim_v))
    lse = np.full((shape.rows_q, shape.num_heads_q), -np.inf)
    sink = None if problem.sink is None else problem.sink.data.astype(np.float64)
    for rows, keys in _sequences(problem):
        q, k, v = _sequence(problem, rows, keys, np.float64)
        scores, _ = _scores(problem, q, k)
        own = _log_sum(scores, sink)
        lse[rows] = own.T
        out[rows] = np.einsum("hij,jhd->ihd", _weights(scores, own), v)
    return Forward(out=out, lse=lse)


def expect(problem: Problem[Array], exact: Forward) -> Expected:
    """What the server's answer is held against: the float64 gradients and the error budget.

    The budget is a multiple of the error that an eager program makes in the problem's dtype (fp32 sums, P and dS
    rounded), two units in the last place of the largest value, and what fp32 sums leave where terms cancel.
    """
    want = backward(problem, exact, np.dtype(np.float64))
    dtype = NUMPY_DTYPES[problem.dtype]
    rounded = Forward(out=exact.out.astype(dtype).astype(np.float32), lse=exact.lse.astype(np.float32))
    eager = backward(problem, rounded, dtype)
    floors, specs = _floors(problem, exact), problem.gradients
    budget = {}
    for role, gradient in want.items():
        have = eager[role].astype(NUMPY_DTYPES[specs[role].dtype]).astype(np.float64)
        budget[role] = (
            EAGER_MULTIPLE * _largest(have - gradient)
            + 2 * EPSILON[specs[role].dtype] * _largest(gradient)
            + floors.get(role, 0.0)
            + FLOOR
        )
    return Expected(gradients=want, budget=budget, zero=_blind_rows(problem))


def backward(problem: Problem[Array], given: Forward, rounding: np.dtype[Any]) -> dict[str, Array]:
    """The gradients from the given forward: in float64 where `rounding` is float64, else with fp32 sums and P and dS
    rounded to it. By role, in the shapes of q, k, v and sink.
    """
    work: np.dtype[Any] = np.dtype(np.float64) if rounding == np.float64 else np.dtype(np.float32)
    found = {role: np.zeros(tensor.shape, work) for role, tensor in problem.gradients.items()}
    flat = {role: _flat(array) for role, array in found.items() if role != "dsink"}
    dout = _flat(problem.dout.data).astype(work)
    dlse = _statistics(problem, work)
    scale, group = problem.softmax_scale, problem.shape.group_size
    for rows, keys in _sequences(problem):
        q, k, v = _sequence(problem, rows, keys, work)
        scores, slope = _scores(problem, q, k)
        lse = given.lse[rows].T.astype(work)
        weights = _weights(scores, lse)
        delta = (dout[rows] * given.out[rows].astype(work)).sum(-1).T
        flowing = dlse[rows].T - delta
        alive = np.isfinite(lse)
        if problem.sink is not None:
            drop = problem.sink.data.astype(work)[:, None] - np.where(alive, lse, 0.0)
            found["dsink"] += (np.where(alive, np.exp(drop), 0.0) * flowing).sum(-1)
        dweights = np.einsum("ihd,jhd->hij", dout[rows], v)
        dscores = weights * (dweights + flowing[..., None]) * slope
        dscores = np.where(np.isfinite(scores) & alive[..., None], dscores, 0.0)
        weights, dscores = _rounded(weights, rounding), _rounded(dscores, rounding)
        flat["dq"][rows] = scale * np.einsum("hij,jhd->ihd", dscores, k)
        flat["dk"][keys] = scale * _over_group(np.einsum("hij,ihd->jhd", dscores, q), group)
        flat["dv"][keys] = _over_group(np.einsum("hij,ihd->jhd", weights, dout[rows]), group)
    return found


def ratios(expected: Expected, gradients: Mapping[str, Array]) -> dict[str, float]:
    """The largest error of each gradient as a part of its budget: right up to 1.0; NaN where a value is not finite."""
    found = {}
    for role in GRADIENT_ROLES:
        if role in expected.gradients:
            have = np.asarray(gradients[role]).astype(np.float64)
            error = _largest(have - expected.gradients[role]) if np.isfinite(have).all() else math.nan
            found[role] = error / expected.budget[role]
    return found


def complaints(expected: Expected, gradients: Mapping[str, Array]) -> list[str]:
    """What is wrong with an answer; empty when it is right."""
    found = [f"{role} is not finite" for role, ratio in ratios(expected, gradients).items() if math.isnan(ratio)]
    for role, ratio in ratios(expected, gradients).items():
        if ratio > 1:
            found.append(f"{role} has {ratio:.3g} times the error it may have")
    for role, zero in expected.zero.items():
        if np.any(_flat(np.asarray(gradients[role]))[zero]):
            found.append(f"{role} has values in rows that nothing flows into")
    return found


def _sequences(problem: Problem[Array]) -> Iterator[tuple[slice, slice]]:
    for q_start, q_len, k_start, k_len in problem.rows:
        yield slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)


def _sequence(problem: Problem[Array], rows: slice, keys: slice, work: Any) -> tuple[Array, Array, Array]:
    """q, k, v of one sequence, each key head repeated for its group."""
    group = problem.shape.group_size
    q = _flat(problem.q.data)[rows].astype(work)
    k, v = (_flat(array)[keys].astype(work).repeat(group, 1) for array in (problem.k.data, problem.v.data))
    return q, k, v


def _scores(problem: Problem[Array], q: Array, k: Array) -> tuple[Array, Any]:
    """Masked logits (heads, queries, keys), -inf where a query does not see a key, and the softcap's slope."""
    scores, slope = np.einsum("ihd,jhd->hij", q, k) * q.dtype.type(problem.softmax_scale), 1.0
    softcap = problem.options.softcap
    if softcap > 0:
        tanh = np.tanh(scores / q.dtype.type(softcap))
        scores, slope = tanh * q.dtype.type(softcap), 1.0 - tanh * tanh
    window = problem.options.window
    at = np.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    key = np.arange(k.shape[0])[None, :]
    seen = np.ones((q.shape[0], k.shape[0]), bool)
    if window.right is not None:
        seen &= key <= at + window.right
    if window.left is not None:
        seen &= (key >= at - window.left) | (key < window.sink_token_length)
    return np.where(seen, scores, -np.inf), slope


def _blind_rows(problem: Problem[Array]) -> dict[str, Array]:
    zero_q, zero_k = np.ones(problem.shape.rows_q, bool), np.ones(problem.shape.rows_k, bool)
    for rows, keys in _sequences(problem):
        q, k, _ = _sequence(problem, rows, keys, np.float64)
        scores, _ = _scores(problem, np.zeros_like(q), np.zeros_like(k))
        seen = np.any(np.isfinite(scores), axis=0)
        zero_q[rows], zero_k[keys] = ~np.any(seen, axis=1), ~np.any(seen, axis=0)
    return {"dq": zero_q, "dk": zero_k, "dv": zero_k}


def _log_sum(scores: Array, sink: Array | None) -> Array:
    """log(sum(exp(scores))) over the keys and the sink: (heads, queries), -inf where there is nothing."""
    top = scores.max(-1, initial=-np.inf)
    if sink is not None:
        top = np.maximum(top, sink[:, None])
    shift = np.where(np.isfinite(top), top, 0.0)
    total = np.exp(scores - shift[..., None]).sum(-1)
    if sink is not None:
        total += np.exp(sink[:, None] - shift)
    with np.errstate(divide="ignore"):
        return np.where(total > 0, shift + np.log(total), -np.inf)


def _weights(scores: Array, lse: Array) -> Array:
    alive = np.isfinite(lse)[..., None]
    return np.where(alive, np.exp(scores - np.where(alive, lse[..., None], 0.0)), 0.0).astype(scores.dtype)


def _flat(array: Array) -> Array:
    """(rows, heads, width) of a dense or packed side, without a copy of the result's own memory."""
    return array.reshape(-1, *array.shape[-2:])


def _statistics(problem: Problem[Array], work: Any) -> Array:
    """dlse as (rows_q, num_heads_q), zeros where there is none."""
    shape = problem.shape
    if problem.dlse is None:
        return np.zeros((shape.rows_q, shape.num_heads_q), work)
    return problem.dlse.data.swapaxes(-1, -2).reshape(shape.rows_q, shape.num_heads_q).astype(work)


def _rounded(array: Array, rounding: np.dtype[Any]) -> Array:
    return array.astype(rounding).astype(array.dtype)


def _over_group(wide: Array, group: int) -> Array:
    """The sum over the query heads of each key head."""
    grouped: Array = wide.reshape(wide.shape[0], wide.shape[1] // group, group, wide.shape[2])
    return np.asarray(grouped.sum(2))


def _floors(problem: Problem[Array], exact: Forward) -> dict[str, float]:
    shape = problem.shape
    # Rows that belong to no sequence may hold anything.
    q, k, v, dout = (
        np.nan_to_num(_flat(tensor.data).astype(np.float64))
        for tensor in (problem.q, problem.k, problem.v, problem.dout)
    )
    cancel = CANCELLATION * abs(problem.softmax_scale) * _longest(dout) * _longest(v)
    terms = math.sqrt(max(1, shape.seqlen_q * shape.group_size))
    floors = {
        "dq": cancel * _largest(k),
        "dk": cancel * _largest(q) * terms,
    }
    if problem.sink is not None:
        # The sink's gradient is a sum over all rows of what rounding `out` leaves in delta.
        alive = np.isfinite(exact.lse)
        drop = problem.sink.data.astype(np.float64) - np.where(alive, exact.lse, 0.0)
        part = np.where(alive, np.exp(drop), 0.0)[..., None] * dout * exact.out
        noise = np.sqrt((part * part).sum((0, 2)))
        floors["dsink"] = 3 * EPSILON[problem.dtype] * _largest(noise)
    return floors


def _longest(rows: Array) -> float:
    return _largest(np.sqrt((rows * rows).sum(-1)))


def _largest(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))
