"""Problems whose tensors lie in blocks of memory, as a device gets them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dqkv.memory import memfd
from dqkv.memory.block import Block, InBlock
from dqkv.problem import Options, Problem
from dqkv.tensor import DType, Tensor

NUMPY = {DType.BF16: np.dtype(bfloat16), DType.FP16: np.dtype(np.float16), DType.FP32: np.dtype(np.float32)}

TRUE_OUT_SEQLEN = 512
"""Longer problems are there to take time; their `out` is zeros."""

block_ids = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Self-attention of `batch_size` sequences."""

    seqlen: int = 24
    batch_size: int = 1
    num_heads: int = 2
    head_dim: int = 16
    dtype: DType = DType.FP32

    @property
    def rows(self) -> tuple[int, int, int, int]:
        return self.batch_size, self.seqlen, self.num_heads, self.head_dim


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A problem in one block, with where its gradients go."""

    problem: Problem[InBlock]
    gradients: dict[str, Tensor[InBlock]]
    block: Block

    def read(self, tensor: Tensor[InBlock]) -> NDArray[np.generic]:
        """A copy of what the file holds for a tensor now."""
        dtype = NUMPY[tensor.dtype]
        data = os.pread(self.block.fd, tensor.extent_nbytes, tensor.data.byte_offset)
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        return as_strided(np.frombuffer(data, dtype=dtype), tensor.shape, strides).copy()

    def answers(self) -> dict[str, NDArray[np.float64]]:
        """The gradients in the file."""
        return {role: self.read(tensor).astype(np.float64) for role, tensor in self.gradients.items()}

    def bytes(self) -> bytes:
        """The whole file."""
        return os.pread(self.block.fd, self.block.nbytes, 0)


def describe(sizes: Sizes, options: Options | None = None) -> Problem[None]:
    """The problem alone, its tensors nowhere."""
    rows = Tensor.dense(sizes.dtype, sizes.rows, None)
    return Problem(q=rows, k=rows, v=rows, dout=rows, out=rows, options=options or Options())


@contextmanager
def placed(
    sizes: Sizes, *, options: Options | None = None, sealed: bool = True, shift: int = 0, gap: int = 0
) -> Iterator[Placed]:
    """A problem with random tensors in a memfd filled with 0xA5; `out` is the true one up to TRUE_OUT_SEQLEN.

    `shift` moves every tensor by so many bytes, `gap` leaves so many elements free between the rows of the gradients.
    A block that is not sealed is a memfd too, but says nothing about its size.
    """
    generator = np.random.default_rng(sizes.seqlen)
    q, k, v, dout = (generator.standard_normal(sizes.rows).astype(NUMPY[sizes.dtype]) for _ in range(4))
    out = forward(q, k, v) if sizes.seqlen <= TRUE_OUT_SEQLEN else np.zeros(sizes.rows)
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out.astype(NUMPY[sizes.dtype])}
    described, block_id, position = describe(sizes, options), next(block_ids), shift
    inputs, gradients = {}, {}
    for role, array in arrays.items():
        inputs[role] = Tensor.dense(sizes.dtype, sizes.rows, InBlock(block_id, position))
        position += -(-array.nbytes // 64) * 64
    for role, tensor in described.gradients.items():
        width = tensor.shape[-1] + gap
        strides = (tensor.shape[1] * tensor.shape[2] * width, tensor.shape[2] * width, width, 1)
        gradients[role] = Tensor(
            dtype=tensor.dtype, shape=tensor.shape, strides=strides, data=InBlock(block_id, position)
        )
        position += -(-(gradients[role].extent_nbytes + gap * 4) // 64) * 64
    position = max(position, 64)  # a file of no bytes cannot be mapped
    fd = memfd.create("dqkv-test", position) if sealed else os.memfd_create("dqkv-test", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, b"\xa5" * position, 0)
        for role, array in arrays.items():
            os.pwrite(fd, array.tobytes(), inputs[role].data.byte_offset)
        yield Placed(
            problem=described.with_tensors(inputs),
            gradients=gradients,
            block=Block(block_id=block_id, fd=fd, nbytes=position, sealed=sealed, writable=True),
        )
    finally:
        os.close(fd)


def forward(q: NDArray[np.generic], k: NDArray[np.generic], v: NDArray[np.generic]) -> NDArray[np.float64]:
    """Attention without a mask in float64, (batch_size, seqlen, num_heads, head_dim)."""
    return np.einsum("bhij,bjhd->bihd", _probabilities(q, k), v.astype(np.float64))


def exact(of: Placed) -> dict[str, NDArray[np.float64]]:
    """The gradients of a problem without a mask in float64."""
    q, k, v, dout = (of.read(getattr(of.problem, role)).astype(np.float64) for role in ("q", "k", "v", "dout"))
    p = _probabilities(q, k)
    dp = np.einsum("bihd,bjhd->bhij", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * float(q.shape[-1]) ** -0.5
    return {
        "dq": np.einsum("bhij,bjhd->bihd", ds, k),
        "dk": np.einsum("bhij,bihd->bjhd", ds, q),
        "dv": np.einsum("bhij,bihd->bjhd", p, dout),
    }


def _probabilities(q: NDArray[np.generic], k: NDArray[np.generic]) -> NDArray[np.float64]:
    scale = float(q.shape[-1]) ** -0.5
    s = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k.astype(np.float64)) * scale
    p = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
    return np.asarray(p / p.sum(-1, keepdims=True))
