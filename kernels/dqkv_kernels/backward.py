"""The backward of attention on any device: one entry, which says what ran.

The way down is `chain` (a GPU, with compiled kernels) or `reference` (the CPU, and any device as an oracle).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from dqkv import errors
from dqkv.problem import Arch, Gradients, Problem
from dqkv.tensor import Tensor
from dqkv_kernels import reference
from dqkv_kernels.dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from dqkv_kernels.chain import Chain


def supports(problem: Problem[object], chain: Chain | None = None) -> str | None:
    """Why no kernel here computes the problem, in words, or None when one does; with a chain, its device's kernels."""
    if chain is not None:
        return chain.refuses(problem)
    if problem.options.arch not in (Arch.AUTO, Arch.CPU):
        return f"arch is {problem.options.arch}, the kernels present are for {Arch.CPU}"
    return None


def attention_backward(
    problem: Problem[object],
    tensors: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor] | None = None,
    *,
    should_stop: Callable[[], object] | None = None,
    chain: Chain | None = None,
) -> Gradients[torch.Tensor]:
    """dq, dk, dv (and dsink with a sink) of the shapes of q, k, v (and sink), and a report of what computed them.

    tensors holds the problem's tensors by role, of its shapes and dtypes on one device, with any strides; they are
    only read. gradients may hold memory for the answers by role, of the shapes and dtypes of `problem.gradients`
    with any strides, each element its own; every element is written, and what is missing is allocated dense.
    should_stop is called between tiles, from the computing threads: it raises, or returns something true, to stop.
    chain, for tensors on its device, runs its kernels on the current stream and returns before they are done; once they
    are launched nothing stops them, and what it raises comes on top.

    Sums are taken in fp32 in an order that follows from the problem alone, and rounded once: the answer is the same
    to the bit from run to run, however many threads torch is set to use.

    Raises ArchUnavailable when `supports` says why not, ShapeMismatch or DTypeMismatch when a tensor is not the
    problem's, Cancelled when should_stop returns something true (the answers are then partly written), and whatever
    should_stop raises.
    """
    if chain is not None:
        return chain.backward(problem, tensors, gradients)
    _check_supported(problem)
    _check_tensors(problem, tensors)
    specs = problem.gradients
    given = gradients or {}
    for role in given:
        if role not in specs:
            raise errors.ShapeMismatch(f"gradients holds {role}, the problem has {', '.join(specs)}", field=role)
    device = tensors["q"].device
    answers = {
        role: given[role].detach()
        if role in given
        else torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
        for role, spec in specs.items()
    }
    for role, spec in specs.items():
        _check_tensor(role, answers[role], spec)
    return reference.attention_backward(problem, _detached(problem, tensors), answers, should_stop)


def softmax_statistics(
    problem: Problem[object],
    tensors: Mapping[str, torch.Tensor],
    *,
    should_stop: Callable[[], object] | None = None,
    chain: Chain | None = None,
) -> torch.Tensor:
    """softmax_lse over exactly the problem's keys, recomputed from q, k and sink: fp32, natural log.

    The shape is (batch_size, num_heads_q, seqlen_q), or (num_heads_q, rows_q) where the queries are packed; -inf (or
    the sink) in rows that see no key, -inf in rows that no sequence owns. tensors, should_stop, chain and what
    is raised: as `attention_backward`.
    """
    _check_supported(problem, chain)
    _check_tensors(problem, tensors)
    if chain is not None:
        return chain.statistics(problem, _detached(problem, tensors))
    q, heads = tensors["q"], problem.shape.num_heads_q
    shape = (heads, q.shape[0]) if problem.queries.is_packed else (q.shape[0], heads, q.shape[1])
    answer = torch.empty(shape, dtype=torch.float32, device=q.device)
    reference.softmax_statistics(problem, _detached(problem, tensors), answer, should_stop)
    return answer


def _detached(problem: Problem[object], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {role: tensors[role].detach() for role in problem.tensors}


def _check_supported(problem: Problem[object], chain: Chain | None = None) -> None:
    reason = supports(problem, chain)
    if reason is not None:
        raise errors.ArchUnavailable(reason, field="arch")


def _check_tensors(problem: Problem[object], tensors: Mapping[str, torch.Tensor]) -> None:
    for role, spec in problem.tensors.items():
        if role not in tensors:
            raise errors.ShapeMismatch(f"tensors lacks {role}, which the problem has", field=role)
        _check_tensor(role, tensors[role], spec)
        if tensors[role].device != tensors["q"].device:
            raise errors.ShapeMismatch(
                f"{role} is on {tensors[role].device}, q on {tensors['q'].device}: must be one device", field=role
            )


def _check_tensor(role: str, tensor: torch.Tensor, spec: Tensor[object] | Tensor[None]) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise errors.ShapeMismatch(f"{role} has shape {tuple(tensor.shape)}, the problem says {spec.shape}", field=role)
    if tensor.dtype is not TORCH_DTYPES[spec.dtype]:
        raise errors.DTypeMismatch(f"{role} is {tensor.dtype}, the problem says {spec.dtype}", field=role)
