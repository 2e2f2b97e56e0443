"""One backward as a caller asks for it: arrays and options become a checked Problem, gradients become arrays again."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypedDict, TypeVar

import numpy as np

from dqkv import errors
from dqkv.client.arrays import (
    Array,
    Home,
    HostArray,
    as_torch,
    dtype_of,
    host_array,
    host_tensor,
    integers,
    is_on_host,
    is_torch,
    mark_written,
    refuse_unwritable,
)
from dqkv.client.outputs import check_outputs
from dqkv.problem import GRADIENT_ROLES, INPUT_ROLES, Arch, Gradients, Lengths, LseScope, Options, Problem, Window
from dqkv.tensor import Tensor

C = TypeVar("C", bound=StrEnum)
D = TypeVar("D")


LONGEST_S = 10 * 365 * 86_400.0
"""Ten years in seconds: what waits longer waits without end, and clocks and timeouts on the wire still count it."""
INTEGER_BITS = 128
"""Integers of more are none of ours, nor are they written out in a message; smaller ones have limits of their own."""


class GivenOptions(TypedDict, total=False):
    """What forward and backward share: the lengths of sequences, and the options; `Given` says what each is."""

    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    seqused_q: Array | None
    seqused_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    causal: bool
    window: Window | tuple[int | None, int | None]
    sink_token_length: int
    softcap: float
    deterministic: bool
    grad_dtype: Any
    arch: Arch | str


class Given(GivenOptions, total=False):
    """What a backward takes besides q, k, v, dout. Shapes are those of `dqkv.Problem`; each may be left out.

    | name | default | what it is |
    |---|---|---|
    | out | | output of the forward, (batch_size, seqlen_q, num_heads_q, head_dim_v), or packed (rows, ...) |
    | delta | | rowsum(dout * out), fp32, shape of softmax_lse; exactly one of out and delta is given |
    | softmax_lse | recomputed | natural log, fp32, (batch_size, num_heads_q, seqlen_q), packed (num_heads_q, rows) |
    | dlse | none | gradient that flows into softmax_lse, fp32, its shape |
    | sink | none | one logit a head in the softmax denominator, (num_heads_q,), fp32 or q's dtype |
    | cu_seqlens_q, cu_seqlens_k | dense | offsets of a packed side, batch_size + 1 integers |
    | seqused_q, seqused_k | all | rows of each sequence that count, batch_size integers |
    | max_seqlen_q, max_seqlen_k | none | upper bound in rows, checked |
    | softmax_scale | head_dim ** -0.5 | any finite number |
    | causal | False | takes the window's right bound as 0, whatever it is |
    | window | unbounded | `dqkv.Window`, or (left, right); None is unbounded, and -1 is an offset like any other |
    | sink_token_length | 0 | keys at the start of each sequence that the left bound never hides |
    | softcap | 0.0 | logits become softcap * tanh(logit / softcap) before the mask; 0 is none |
    | deterministic | False | bitwise equal from run to run |
    | grad_dtype | q's dtype | "fp32" leaves sums that a caller adds up unrounded |
    | arch | "auto" | family of kernels: auto, cpu, sm80, sm90, sm100 |
    | lse_scope | "local" | "global": softmax_lse and out (or delta) run over more keys than this request's |
    | dq, dk, dv, dsink | new arrays | memory that the gradients are written to; a region's is written by the server |
    """

    out: Array | None
    delta: Array | None
    softmax_lse: Array | None
    dlse: Array | None
    sink: Array | None
    lse_scope: LseScope | str
    dq: Array | None
    dk: Array | None
    dv: Array | None
    dsink: Array | None


BACKWARD_ARGUMENTS = ("q", "k", "v", "dout", "timeout_s", *Given.__annotations__)
ELSEWHERE = {
    "do": "dout",
    "grad_out": "dout",
    "is_causal": "causal",
    "lse": "softmax_lse",
    "logit_cap": "softcap",
    "scale": "softmax_scale",
    "sm_scale": "softmax_scale",
    "window_size": "window",
}
"""What other programs call our arguments, where the nearest spelling would be none or another one."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of one backward; `Given` says what each is."""

    q: Array
    k: Array
    v: Array
    dout: Array
    out: Array | None = None
    delta: Array | None = None
    softmax_lse: Array | None = None
    dlse: Array | None = None
    sink: Array | None = None
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    seqused_q: Array | None = None
    seqused_k: Array | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window: Window | tuple[int | None, int | None] = (None, None)
    sink_token_length: int = 0
    softcap: float = 0.0
    deterministic: bool = False
    grad_dtype: Any = None
    arch: Arch | str = Arch.AUTO
    lse_scope: LseScope | str = LseScope.LOCAL
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dsink: Array | None = None

    def problem(self) -> Problem[HostArray]:
        """The checked problem. Raises the InvalidRequest of what does not fit, before anything is sent."""
        return self.described(host_tensor)

    def described(self, describe: Callable[[str, Array], Tensor[D]]) -> Problem[D]:
        """The checked problem with its tensors as `describe` (role, array) sees them. Raises an InvalidRequest."""
        given = {role: getattr(self, role) for role in INPUT_ROLES}
        return Problem(
            **{role: describe(role, array) for role, array in given.items() if array is not None},
            queries=self._lengths("q"),
            keys=self._lengths("k"),
            options=self._options(),
        )

    def outputs(self, problem: Problem[HostArray]) -> dict[str, HostArray]:
        """The caller's own memory for gradients, by role, where it is this machine's.

        What lies on another device is written by `answer`, and checked here; raises what `check_outputs` does.
        """
        given = {role: getattr(self, role) for role in GRADIENT_ROLES if getattr(self, role) is not None}
        for role, array in given.items():
            if is_torch(array):
                refuse_unwritable(role, array)
        check_outputs(problem, {role: array for role, array in given.items() if not is_on_host(array)})
        hosts = {role: host_array(role, array) for role, array in given.items() if is_on_host(array)}
        for role in hosts:
            if is_torch(given[role]):
                mark_written(given[role])
        return hosts

    def answer(self, gradients: Gradients[HostArray]) -> Gradients[Array]:
        """The gradients as the kind of arrays that q is, or as the caller's own arrays where he gave them."""
        home, arrays = Home.of(self.q), {}
        for role in GRADIENT_ROLES:
            host, own = getattr(gradients, role), getattr(self, role)
            if own is None or host is None:
                arrays[role] = None if host is None else home.give(host)
                continue
            if not is_on_host(own):
                own.detach().copy_(as_torch(host))
            arrays[role] = own
        return Gradients(**arrays, report=gradients.report)

    def _lengths(self, side: str) -> Lengths:
        max_seqlen = getattr(self, f"max_seqlen_{side}")
        return Lengths(
            cu_seqlens=integers(f"cu_seqlens_{side}", getattr(self, f"cu_seqlens_{side}")),
            seqused=integers(f"seqused_{side}", getattr(self, f"seqused_{side}")),
            max_seqlen=None if max_seqlen is None else _integer(f"max_seqlen_{side}", max_seqlen),
        )

    def _options(self) -> Options:
        return Options(
            softmax_scale=None if self.softmax_scale is None else number("softmax_scale", self.softmax_scale),
            window=self._window(),
            softcap=number("softcap", self.softcap),
            deterministic=_flag("deterministic", self.deterministic),
            grad_dtype=None if self.grad_dtype is None else dtype_of("grad_dtype", self.grad_dtype),
            arch=choice("arch", Arch, self.arch),
            lse_scope=choice("lse_scope", LseScope, self.lse_scope),
        )

    def _window(self) -> Window:
        window = self.window
        if not isinstance(window, Window):
            left, right = _pair(window)
            window = Window(left=left, right=right)
        sink_token_length = _integer("sink_token_length", self.sink_token_length)
        if sink_token_length:
            window = replace(window, sink_token_length=sink_token_length)
        return replace(window, right=0) if _flag("causal", self.causal) else window


def known_only(function: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises TypeError for an argument that the function of this name does not have, with the nearest that it has."""
    for name in given:
        if name not in known:
            near = ELSEWHERE.get(name) or difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise TypeError(f"{function}() has no argument {name!r}; the nearest is {near!r}")


def number(field: str, value: Any) -> float:
    """A number, also one of numpy's or a tensor of one. Raises OptionInvalid for text, a truth value, or else."""
    try:
        if isinstance(value, str | bytes | bool | np.bool_):
            raise TypeError
        return float(value)
    except OverflowError:
        raise errors.OptionInvalid(f"{field} is larger than any float", field=field) from None
    except (TypeError, ValueError, RuntimeError):
        raise errors.OptionInvalid(f"{field} is {value!r}, must be a number", field=field) from None


def seconds(field: str, value: Any) -> float:
    """A time to wait, 0 or more, at most LONGEST_S: infinity is that long. Raises OptionInvalid for what is none."""
    wait_s = number(field, value)
    if not wait_s >= 0.0:
        raise errors.OptionInvalid(f"{field} is {wait_s}, must be 0 or more", field=field)
    return min(wait_s, LONGEST_S)


def choice(field: str, kind: type[C], value: str) -> C:
    """One of a few names. Raises OptionInvalid for another."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise errors.OptionInvalid(f"{field} is {value!r}, must be one of {known}", field=field) from None


def _flag(field: str, value: Any) -> bool:
    if isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise errors.OptionInvalid(f"{field} is {value!r}, must be True or False", field=field)


def _integer(field: str, value: Any) -> int:
    try:
        integer = operator.index(value)
    except TypeError:
        raise errors.OptionInvalid(f"{field} is {value!r}, must be an integer", field=field) from None
    if integer.bit_length() > INTEGER_BITS:
        raise errors.OptionInvalid(f"{field} has {integer.bit_length()} bits, far beyond any limit", field=field)
    return integer


def _pair(window: Any) -> tuple[int | None, int | None]:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise errors.OptionInvalid(f"window is {window!r}, must be a Window or (left, right)", field="window")
    left, right = (None if bound is None else _integer("window", bound) for bound in window)
    return left, right
