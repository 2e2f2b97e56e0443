"""A request's inputs as a `dqkv` problem, checked by it or, for tests of the far side's checks, not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dqkv.location import Inline, InStream
from dqkv.problem import INPUT_ROLES, Arch, Lengths, LseScope, Options, Problem, Window
from dqkv.tensor import DType, Tensor

from .inputs import Inputs

DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16, torch.float32: DType.FP32}

D = TypeVar("D")
T = TypeVar("T")
Build = Callable[..., Any]
Describe = Callable[[torch.Tensor], Tensor[D]]


def as_given(tensor: torch.Tensor) -> Tensor[torch.Tensor]:
    """Dtype, shape and strides of a tensor, with the tensor itself as its bytes."""
    return Tensor(dtype=DTYPES[tensor.dtype], shape=tuple(tensor.shape), strides=tuple(tensor.stride()), data=tensor)


def inline(tensor: torch.Tensor) -> Tensor[Inline]:
    """Dtype and shape of a tensor, with a dense copy of its bytes in the message."""
    dense = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Tensor.dense(DTYPES[tensor.dtype], tensor.shape, Inline(memoryview(dense.numpy().tobytes())))


def streamed(tensor: torch.Tensor) -> Tensor[InStream]:
    """Dtype and shape of a tensor whose bytes follow in frames: what a header says, whatever the size."""
    return Tensor.dense(DTYPES[tensor.dtype], tensor.shape, InStream())


def to_problem(inputs: Inputs, describe: Describe[D]) -> Problem[D]:
    """The problem that these inputs ask. Raises the InvalidRequest of what does not fit."""
    problem: Problem[D] = _assembled(inputs, describe, _checked)
    return problem


def unchecked_problem(inputs: Inputs, describe: Describe[D]) -> Problem[D]:
    """The same problem with nothing checked: what a client sends that checks nothing.

    Raises KeyError for a dtype or an arch that has no name on the wire.
    """
    problem: Problem[D] = _assembled(inputs, describe, _unchecked)
    return problem


def _assembled(inputs: Inputs, describe: Describe[D], build: Build) -> Any:
    given = {role: getattr(inputs, role) for role in INPUT_ROLES}
    window = inputs.window
    options = build(
        Options,
        softmax_scale=inputs.softmax_scale,
        window=build(Window, left=window.left, right=window.right, sink_token_length=window.sink_token_length),
        softcap=inputs.softcap,
        deterministic=inputs.deterministic,
        grad_dtype=None if inputs.grad_dtype is None else DTYPES[inputs.grad_dtype],
        arch=Arch(inputs.arch),
        lse_scope=LseScope[inputs.lse_scope],
    )
    return build(
        Problem,
        **{role: None if tensor is None else describe(tensor) for role, tensor in given.items()},
        queries=_lengths(inputs.cu_seqlens_q, inputs.seqused_q, inputs.max_seqlen_q),
        keys=_lengths(inputs.cu_seqlens_k, inputs.seqused_k, inputs.max_seqlen_k),
        options=options,
    )


def _lengths(cu_seqlens: torch.Tensor | None, seqused: torch.Tensor | None, max_seqlen: int | None) -> Lengths:
    return Lengths(
        cu_seqlens=None if cu_seqlens is None else tuple(cu_seqlens.tolist()),
        seqused=None if seqused is None else tuple(seqused.tolist()),
        max_seqlen=max_seqlen,
    )


def _checked(kind: type[T], **fields: Any) -> T:
    return kind(**fields)


def _unchecked(kind: type[T], **fields: Any) -> T:
    """An instance whose __post_init__ never ran."""
    value = object.__new__(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        object.__setattr__(value, field.name, fields[field.name])
    return value
