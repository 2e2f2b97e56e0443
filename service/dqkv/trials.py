"""Problems whose exact gradients are known: what `dqkv check` sends to a running server."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dqkv import oracle
from dqkv.problem import Lengths, LseScope, Options, Problem, Window
from dqkv.tensor import NUMPY_DTYPES, DType, Tensor

Array: TypeAlias = NDArray[Any]


class Given(StrEnum):
    """What a trial sends of the forward's results."""

    OUT_AND_LSE = "out, lse"
    DELTA_AND_LSE = "delta, lse"
    OUT = "out"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One problem: sizes, options, and what of the forward it sends.

    A side is packed where seqlens_* lists its sequences; tail adds rows that belong to none. poison fills rows that
    do not count with NaN. block sends the second half of the keys with the softmax_lse of all of them.
    """

    name: str
    shows: str
    dtype: DType = DType.BF16
    batch_size: int = 2
    seqlen_q: int = 96
    seqlen_k: int = 96
    num_heads_q: int = 4
    num_heads_kv: int = 4
    head_dim: int = 64
    head_dim_v: int = 64
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None
    tail: int = 0
    seqused_k: tuple[int, ...] | None = None
    poison: bool = False
    block: bool = False
    sink: bool = False
    dlse: bool = False
    given: Given = Given.OUT_AND_LSE
    options: Options = field(default_factory=Options)


CAUSAL = Options(window=Window(right=0))

# fmt: off
TRIALS = (
    Trial(name="dense", shows="the plain case"),
    Trial(name="causal_grouped", shows="key heads shared by 4 query heads", num_heads_q=8, num_heads_kv=2,
          dtype=DType.FP16, options=CAUSAL),
    Trial(name="causal_cross", shows="more keys than queries: aligned to the bottom right", seqlen_q=33, seqlen_k=201,
          num_heads_kv=1, options=CAUSAL),
    Trial(name="causal_blind_rows", shows="the first 80 queries see no key", seqlen_q=160, seqlen_k=80, options=CAUSAL),
    Trial(name="window", shows="a window on both sides", seqlen_q=130, seqlen_k=170,
          options=Options(window=Window(left=20, right=7))),
    Trial(name="window_sink_tokens", shows="the first keys stay visible", seqlen_q=150, seqlen_k=150,
          options=Options(window=Window(left=24, right=0, sink_token_length=4))),
    Trial(name="softcap", shows="capped logits", options=Options(softcap=4.0, window=Window(right=0))),
    Trial(name="scale", shows="a negative softmax_scale", options=Options(softmax_scale=-0.25)),
    Trial(name="packed", shows="sequences of 0 to 129 rows, and rows of no sequence", seqlens_q=(63, 0, 129, 1),
          seqlens_k=(80, 5, 129, 0), tail=9, poison=True, num_heads_kv=2, options=CAUSAL),
    Trial(name="used_rows", shows="NaN behind the used rows", batch_size=3, seqlen_q=40, seqlen_k=128,
          seqused_k=(128, 0, 45), poison=True, num_heads_kv=2),
    Trial(name="wide_heads", shows="head_dim 192, head_dim_v 128", seqlen_q=70, seqlen_k=70, head_dim=192,
          head_dim_v=128, options=CAUSAL),
    Trial(name="widest_heads", shows="head_dim 256, deterministic", seqlen_q=65, seqlen_k=65, head_dim=256,
          head_dim_v=256, options=Options(deterministic=True)),
    Trial(name="sink_dlse", shows="a sink logit, and a gradient into softmax_lse", sink=True, dlse=True, num_heads_kv=2,
          options=CAUSAL),
    Trial(name="delta", shows="delta in place of out", given=Given.DELTA_AND_LSE, options=CAUSAL),
    Trial(name="no_lse", shows="softmax_lse recomputed", given=Given.OUT, num_heads_kv=2, options=CAUSAL),
    Trial(name="grad_fp32", shows="unrounded sums", options=Options(window=Window(right=0), grad_dtype=DType.FP32)),
    Trial(name="fp32", shows="fp32 inputs", dtype=DType.FP32, num_heads_kv=2, options=CAUSAL),
    Trial(name="key_block", shows="one key block of a longer sequence", seqlen_k=256, num_heads_kv=2, block=True),
    Trial(name="long", shows="1024 rows", batch_size=1, seqlen_q=1024, seqlen_k=1024, num_heads_q=2, num_heads_kv=2,
          options=CAUSAL),
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A trial's problem and what its answer must be."""

    problem: Problem[Array]
    expected: oracle.Expected


def draw(trial: Trial) -> Drawn:
    """The problem with its values drawn; the same trial draws the same."""
    rng = np.random.default_rng(zlib.crc32(trial.name.encode()))
    dtype = NUMPY_DTYPES[trial.dtype]
    q_rows, k_rows = _side(trial, "q"), _side(trial, "k")
    heads, kv_heads = trial.num_heads_q, trial.num_heads_kv
    q, k, v, dout = (
        rng.standard_normal(shape, np.float32).astype(dtype)
        for shape in (
            (*q_rows, heads, trial.head_dim),
            (*k_rows, kv_heads, trial.head_dim),
            (*k_rows, kv_heads, trial.head_dim_v),
            (*q_rows, heads, trial.head_dim_v),
        )
    )
    statistics = (heads, q_rows[0]) if trial.seqlens_q else (q_rows[0], heads, q_rows[1])
    zeros = np.zeros(statistics, np.float32)
    problem = Problem(
        q=_tensor(q),
        k=_tensor(k),
        v=_tensor(v),
        dout=_tensor(dout),
        delta=_tensor(zeros),
        dlse=_tensor(rng.standard_normal(statistics, np.float32)) if trial.dlse else None,
        sink=_tensor(rng.standard_normal(heads, np.float32)) if trial.sink else None,
        queries=Lengths(cu_seqlens=_offsets(trial.seqlens_q)),
        keys=Lengths(cu_seqlens=_offsets(trial.seqlens_k), seqused=trial.seqused_k),
        options=trial.options,
    )
    exact = oracle.forward(problem)
    problem = _with_forward(trial, problem, exact)
    if trial.block:
        problem = _second_half(problem)
    if trial.poison:
        _poison(problem)
    return Drawn(problem=problem, expected=oracle.expect(problem, exact))


def _side(trial: Trial, side: str) -> tuple[int, ...]:
    seqlens = getattr(trial, f"seqlens_{side}")
    return (trial.batch_size, getattr(trial, f"seqlen_{side}")) if seqlens is None else (sum(seqlens) + trial.tail,)


def _offsets(seqlens: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if seqlens is None else (0, *np.cumsum(seqlens).tolist())


def _tensor(array: Array) -> Tensor[Array]:
    names = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
    return Tensor.dense(names[array.dtype], array.shape, array)


def _with_forward(trial: Trial, problem: Problem[Array], exact: oracle.Forward) -> Problem[Array]:
    out = exact.out.reshape(problem.dout.shape).astype(problem.dout.data.dtype)
    lse = exact.lse.reshape(*problem.dout.shape[:-1]).swapaxes(-1, -2).astype(np.float32)
    delta = (problem.dout.data.astype(np.float32) * out.astype(np.float32)).sum(-1).swapaxes(-1, -2)
    return replace(
        problem,
        out=None if trial.given is Given.DELTA_AND_LSE else _tensor(out),
        delta=_tensor(np.ascontiguousarray(delta)) if trial.given is Given.DELTA_AND_LSE else None,
        softmax_lse=None if trial.given is Given.OUT else _tensor(np.ascontiguousarray(lse)),
    )


def _second_half(problem: Problem[Array]) -> Problem[Array]:
    half = problem.k.shape[1] // 2
    k, v = (_tensor(np.ascontiguousarray(tensor.data[:, half:])) for tensor in (problem.k, problem.v))
    return replace(problem, k=k, v=v, options=replace(problem.options, lse_scope=LseScope.GLOBAL))


def _poison(problem: Problem[Array]) -> None:
    """Fills the rows that do not count with NaN, in place."""
    shape, rows = problem.shape, problem.rows
    used = {"q": np.zeros(shape.rows_q, bool), "k": np.zeros(shape.rows_k, bool)}
    for q_start, q_len, k_start, k_len in rows:
        used["q"][q_start : q_start + q_len] = True
        used["k"][k_start : k_start + k_len] = True
    for role, side in (("q", "q"), ("dout", "q"), ("out", "q"), ("k", "k"), ("v", "k")):
        tensor = getattr(problem, role)
        if tensor is not None:
            tensor.data.reshape(-1, *tensor.shape[-2:])[~used[side]] = np.nan
