"""The backwards that ours is compared with: FlashAttention-2 and cuDNN through PyTorch, FlashAttention-3 and -4.

FlashAttention-4 is its package's CuTe interface, FlashAttention-3 its kernels as the package dew_flash_attn offers them
to JAX. What is not installed, or does not take a case, is left out, and why is said.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Refusals = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A backward to be timed: `call` starts it, `wait` returns when all that was started is done."""

    call: Callable[[], object]
    wait: Callable[[], object] = torch.cuda.synchronize


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """q, dout (batch, seqlen, heads, head_dim), k, v with fewer heads perhaps, and the mask."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    causal: bool


def forward(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """out and softmax_lse (natural log) of FlashAttention-2's forward."""
    out, lse, *_ = _flash_forward(tensors)
    return out.transpose(1, 2), lse


def peers(tensors: Tensors) -> tuple[dict[str, Work], Refusals]:
    """Every peer that takes the case, by name, and in words why the others do not."""
    works, refusals = {}, {}
    for name, build in {"fa2": fa2, "cudnn": cudnn, "fa3": fa3, "fa4": fa4}.items():
        try:
            works[name] = build(tensors)
            works[name].call()
            works[name].wait()
        except Exception as refusal:  # noqa: BLE001 - each peer refuses in its own way, and none may end the run
            works.pop(name, None)
            refusals[name] = f"{type(refusal).__name__}: {refusal}".splitlines()[0][:160]
    return works, refusals


def fa2(tensors: Tensors) -> Work:
    """PyTorch's FlashAttention-2. Raises RuntimeError where it has no kernel."""
    q, k, v, dout = _heads_first(tensors)
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = _flash_forward(tensors)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return Work(
        call=lambda: backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, tensors.causal, seed, offset)
    )


def cudnn(tensors: Tensors) -> Work:
    """PyTorch's cuDNN attention. Raises RuntimeError where cuDNN has no kernel."""
    q, k, v, dout = _heads_first(tensors)
    aten = torch.ops.aten
    got = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, tensors.causal, False)
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = got
    return Work(
        call=lambda: aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, tensors.causal
        )
    )


def fa3(tensors: Tensors) -> Work:
    """FlashAttention-3 through JAX, on JAX's own stream. Raises ImportError where either is not installed."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import dew_flash_attn
    import jax

    q, k, v, dout = (
        jax.dlpack.from_dlpack(tensor.contiguous()) for tensor in (tensors.q, tensors.k, tensors.v, tensors.dout)
    )
    scale, window = tensors.q.shape[-1] ** -0.5, (-1, -1)
    run_forward = jax.jit(lambda q, k, v: dew_flash_attn._forward3(q, k, v, None, None, scale, tensors.causal, window))
    out, lse = run_forward(q, k, v)
    run_backward = jax.jit(
        lambda dout, q, k, v, out, lse: dew_flash_attn._backward3(
            dout, q, k, v, out, lse, None, None, scale, tensors.causal, window
        )
    )
    last: list[Any] = []

    def call() -> None:
        last[:] = [run_backward(dout, q, k, v, out, lse)]

    return Work(call=call, wait=lambda: [each.block_until_ready() for each in last[0]] if last else None)


def fa4(tensors: Tensors) -> Work:
    """FlashAttention-4; compiles its kernels. Raises ImportError where it or its compiler is not installed."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, dout = tensors.q, tensors.k, tensors.v, tensors.dout
    out, lse = _flash_attn_fwd(q, k, v, causal=tensors.causal, return_lse=True)[:2]
    return Work(call=lambda: _flash_attn_bwd(q, k, v, out, dout, lse, causal=tensors.causal))


def _flash_forward(tensors: Tensors) -> Any:
    q, k, v, _ = _heads_first(tensors)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, tensors.causal, False)


def _heads_first(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """q, k, v, dout as PyTorch takes them: (batch, heads, seqlen, head_dim), as many key heads as query heads."""
    group = tensors.q.shape[2] // tensors.k.shape[2]
    k, v = (t.repeat_interleave(group, 2) if group > 1 else t for t in (tensors.k, tensors.v))
    return tuple(tensor.transpose(1, 2) for tensor in (tensors.q, k, v, tensors.dout))
