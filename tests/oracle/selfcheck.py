"""Second opinions on the exact answer: automatic differentiation of torch's own softmax, and finite differences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .case import Case, Ring
from .exact import F64, Exact, Scoring, attend, solve, solved
from .geometry import NEG_INF, Sequence, geometry, visible
from .inputs import Inputs
from .layouts import FUSED
from .values import Values, make_values

GAPPED_LAYOUTS = (FUSED, "cat_slice", "sbhd", "bhsd")
POISON = "poison_unused"


@dataclass(frozen=True, kw_only=True, eq=False)
class Differentiated:
    """What automatic differentiation gives: gradients of q, k, v, sink in flat rows, and by sequence out and lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    outs: dict[int, Tensor]
    lses: dict[int, Tensor]


def differentiate(case: Case, values: Values) -> Differentiated:
    """Gradients of sum(out * dout) + sum(softmax_lse * dlse) in float64 through torch.softmax and logsumexp."""
    leaves = {name: getattr(values, name).to(F64).requires_grad_() for name in ("q", "k", "v")}
    sink = None if values.sink is None else values.sink.to(F64).requires_grad_()
    loss = sum((leaf.sum() for leaf in leaves.values()), torch.zeros((), dtype=F64)) * 0.0
    if sink is not None:
        loss = loss + sink.masked_fill(~torch.isfinite(sink), 0.0).sum() * 0.0
    outs, lses = {}, {}
    for index, sequence in enumerate(geometry(case).sequences):
        if sequence.q_len == 0:
            continue
        rows = slice(sequence.q_start, sequence.q_start + sequence.q_len)
        out, lse, live = _differentiable(case, leaves, sink, index, sequence)
        loss = loss + (out * values.dout[rows].to(F64)).sum()
        if values.dlse is not None:
            loss = loss + (lse * values.dlse[rows].to(F64).T).masked_fill(~live, 0.0).sum()
        outs[index], lses[index] = out.detach(), lse.detach().masked_fill(~live, NEG_INF)
    loss.backward()
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    return Differentiated(**grads, sink=None if sink is None else sink.grad, outs=outs, lses=lses)


def autograd_difference(case: Case) -> float:
    """Largest difference between `solve` and automatic differentiation over all outputs; inf where either is NaN.

    For a ring every block is solved, and the blocks' dq are added up.
    """
    values, exact = make_values(case), solved(case)
    auto = differentiate(case, values)
    differences = []
    for index, (q_start, q_len, _, _) in enumerate(geometry(case).sequences):
        if index in auto.outs:
            rows = slice(q_start, q_start + q_len)
            differences.append(_difference(exact.out[rows], auto.outs[index]))
            differences.append(_difference(exact.softmax_lse[rows].T, auto.lses[index]))
    if exact.dsink is not None and auto.sink is not None:
        differences.append(_difference(exact.dsink, auto.sink))
    if case.ring is None:
        differences += [_difference(getattr(exact, f"d{name}"), getattr(auto, name)) for name in ("q", "k", "v")]
        return max(differences)
    total, count = torch.zeros_like(exact.dq), case.ring.count
    for block in range(count):
        part = solve(replace(case, ring=Ring(block=block, count=count)), values)
        total += part.dq
        starts = torch.arange(case.batch_size) * count + block
        rows_of_block = (starts[:, None] * case.seqlen_k + torch.arange(case.seqlen_k)).flatten()
        differences.append(_difference(part.dk, auto.k[rows_of_block]))
        differences.append(_difference(part.dv, auto.v[rows_of_block]))
    return max(*differences, _difference(total, auto.q))


def finite_difference_error(case: Case, step: float = 1e-5) -> float:
    """Largest difference between `solve` and central differences over every element of q, k, v and sink."""
    drawn = make_values(case)
    wide = {
        name: None if tensor is None else tensor.to(F64).clone()
        for name in ("q", "k", "v", "dout", "dlse", "sink")
        for tensor in (getattr(drawn, name),)
    }
    values = Values(**wide)  # type: ignore[arg-type]
    exact, worst = solve(case, values), 0.0
    for name in ("q", "k", "v", "sink"):
        elements, want = wide[name], getattr(exact, f"d{name}")
        if elements is None:
            continue
        elements = elements.view(-1)
        for index in range(elements.numel()):
            keep = elements[index].item()
            elements[index] = keep + step
            above = _loss(case, values)
            elements[index] = keep - step
            below = _loss(case, values)
            elements[index] = keep
            worst = max(worst, abs((above - below) / (2 * step) - want.view(-1)[index].item()))
    return worst


def solution_complaints(exact: Exact) -> list[str]:
    """What no answer may be, whatever the case: not finite, or not zero where nothing flows; empty when right."""
    zero_rows = {"dq": exact.zero_q_rows, "dk": exact.zero_k_rows, "dv": exact.zero_k_rows}
    complaints = [
        f"{name}: not finite" for name in ("out", "dq", "dk", "dv") if not torch.isfinite(getattr(exact, name)).all()
    ]
    return complaints + [f"{name}: not zero" for name, rows in zero_rows.items() if getattr(exact, name)[rows].any()]


def layout_complaints(case: Case, inputs: Inputs) -> list[str]:
    """Tensors of a request that hold other values than were drawn, or lie otherwise than asked; empty when right.

    Values are not compared where rows are poisoned or the request holds a part of k and v.
    """
    values, complaints = make_values(case), []
    for name in ("q", "k", "v", "dout"):
        tensor, kind = getattr(inputs, name), getattr(case.layouts, name)
        if POISON not in case.special and case.ring is None:
            drawn = getattr(values, name)
            if not torch.equal(tensor.reshape(drawn.shape), drawn):
                complaints.append(f"{name}: other values")
        strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        as_asked = {
            "offset1": tensor.storage_offset() == 1,
            "lastdim2": tensor.stride(-1) == 2,
            "expanded": not any(strides),
            "expanded_heads": tensor.stride(-2) == 0,
        } | dict.fromkeys(GAPPED_LAYOUTS, not tensor.is_contiguous())
        if not as_asked.get(kind, True):
            complaints.append(f"{name}: strides {tensor.stride()} for {kind}")
    return complaints


def _differentiable(
    case: Case, leaves: dict[str, Tensor], sink: Tensor | None, index: int, sequence: Sequence
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_lse, which rows of it exist) of one sequence, on the tape."""
    q_start, q_len, k_start, k_len = sequence
    if case.ring is not None:
        k_len *= case.ring.count
        k_start = index * k_len
    q = leaves["q"][q_start : q_start + q_len].transpose(0, 1)
    k, v = (leaves[name][k_start : k_start + k_len].transpose(0, 1) for name in ("k", "v"))
    k, v = (t.unsqueeze(1).expand(-1, case.group_size, -1, -1).flatten(0, 1) for t in (k, v))
    s = torch.matmul(q, k.transpose(1, 2)) * case.scale
    if case.softcap > 0:
        s = torch.tanh(s / case.softcap) * case.softcap
    columns = [s.masked_fill(~_allowed(case, q_len, k_len), NEG_INF)]
    if sink is not None:
        columns.append(sink[:, None, None].expand(-1, q_len, 1))
    logits = torch.cat(columns, -1)
    live = torch.isfinite(logits).any(-1)
    logits = torch.where(live[..., None], logits, torch.zeros_like(logits))
    p = torch.softmax(logits, -1)[..., :k_len] * live[..., None]
    out = torch.matmul(p, v) if k_len else p.new_zeros(case.num_heads_q, q_len, case.head_dim_v)
    lse = torch.logsumexp(logits, -1) if logits.shape[-1] else logits.sum(-1)
    return out.transpose(0, 1), lse, live


def _allowed(case: Case, q_len: int, k_len: int) -> Tensor:
    """The mask, key by key and straight from the case, so that it shares nothing with `visible`."""
    allowed = torch.zeros(q_len, k_len, dtype=torch.bool)
    for i in range(q_len):
        diagonal = i + k_len - q_len
        right = 0 if case.causal else case.window_right
        end = k_len if right is None else max(0, min(k_len, diagonal + right + 1))
        start = 0 if case.window_left is None else diagonal - case.window_left
        row = [j >= start or j < case.sink_token_length for j in range(end)]
        allowed[i, :end] = torch.tensor(row, dtype=torch.bool)
    return allowed


def _loss(case: Case, values: Values) -> float:
    total = 0.0
    for q_start, q_len, k_start, k_len in geometry(case).sequences:
        rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        seen = visible(q_len, k_len, case.window)
        scoring = Scoring(visible=seen, scale=case.scale, softcap=case.softcap, sink=values.sink)
        out, lse = attend(values.q[rows], values.k[keys], values.v[keys], scoring)
        total += (out * values.dout[rows]).sum().item()
        if values.dlse is not None:
            total += (lse * values.dlse[rows].T).masked_fill(~torch.isfinite(lse), 0.0).sum().item()
    return total


def _difference(a: Tensor, b: Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    # Infinities that agree are no difference.
    difference = (a - b).abs().masked_fill(a == b, 0.0)
    return float("inf") if difference.isnan().any() else difference.max().item()
