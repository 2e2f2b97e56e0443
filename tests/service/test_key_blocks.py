"""Sequences of thousands of tokens: whole, and split into blocks of keys whose gradients a caller adds up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from oracle.budget import FROBENIUS_SEQLEN, error_budget, judge
from oracle.case import VARIANTS, Case, Variant
from oracle.exact import solved
from oracle.inputs import Inputs, build_inputs
from rig.ways import Way, Ways
from torch import Tensor

PARTIAL_SUMS = Variant(name="partial_sums", row_sums="delta", grad_dtype="fp32", reason="what ring attention asks for")
VARIANT = {variant.name: variant for variant in VARIANTS}
SEQLEN = 3072


def _long(name: str, **given: Any) -> Case:
    sizes = {"seqlen_q": SEQLEN, "seqlen_k": SEQLEN, "num_heads_q": 2, "num_heads_kv": 1, "head_dim_v": 64}
    return Case(name=name, theme="CP", **{**sizes, **given})


CAUSAL = _long("blocks_causal_sink_dlse", causal=True, sink="fp32", dlse=True)
WINDOW = _long("blocks_window_fp16", dtype="fp16", head_dim=32, head_dim_v=40, window_left=1000, window_right=70)
CROSS = _long("blocks_cross", seqlen_q=FROBENIUS_SEQLEN, num_heads_q=1, head_dim=32)

SPLITS = {
    "four_equal": (768, 768, 768, 768),
    "one_tiny": (1, 1500, 1571),
    "empty_ones": (0, 1024, 0, 2048),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Total:
    """Gradients that a caller put together."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


def blocks_of(inputs: Inputs, sizes: tuple[int, ...]) -> list[Inputs]:
    """One request for each block of keys: the whole's softmax_lse and delta, and its window seen from the block.

    A window is aligned to the last key of what the request holds, so its bounds move with the block's end.
    """
    assert sum(sizes) == inputs.k.shape[1]
    blocks, start = [], 0
    for size in sizes:
        end = start + size
        behind = inputs.k.shape[1] - end
        window = inputs.window
        left = None if window.left is None else window.left - behind
        right = None if window.right is None else window.right + behind
        blocks.append(
            replace(
                inputs,
                k=inputs.k[:, start:end],
                v=inputs.v[:, start:end],
                window=replace(window, left=left, right=right),
                lse_scope="GLOBAL",
            )
        )
        start = end
    return blocks


@pytest.mark.parametrize("way", Way, ids=str)
@pytest.mark.parametrize("case", [CAUSAL, WINDOW], ids=lambda case: case.name)
def test_blocks_of_keys_add_up_to_the_whole(case: Case, way: Way, ways: Ways) -> None:
    complaints = []
    for name, sizes in SPLITS.items():
        if way is not Way.STREAM and name != "four_equal":
            continue
        inputs = build_inputs(case, PARTIAL_SUMS)
        answers = [ways.ask(block, way) for block in blocks_of(inputs, sizes)]
        # Each block reports all of the sink's gradient: it is taken once, from any of them.
        for answer in answers[1:]:
            if case.sink:
                assert torch.equal(answer.dsink, answers[0].dsink)
        total = Total(
            dq=torch.stack([answer.dq for answer in answers]).sum(0),
            dk=torch.cat([answer.dk for answer in answers], dim=1),
            dv=torch.cat([answer.dv for answer in answers], dim=1),
            dsink=answers[0].dsink,
        )
        complaints += [f"{name}: {text}" for text in judge(case, solved(case), total, PARTIAL_SUMS)]
    assert not complaints, "\n".join(complaints)


def test_a_given_softmax_lse_is_used_and_an_absent_one_is_the_blocks_own(ways: Ways) -> None:
    """The gradients are a function of the inputs: the scope says what may be absent, nothing else."""
    blocks = blocks_of(build_inputs(CAUSAL, PARTIAL_SUMS), SPLITS["four_equal"])
    block = blocks[0]
    answer = ways.ask(block, Way.STREAM)
    local = ways.ask(replace(block, lse_scope="LOCAL", softmax_lse=None), Way.STREAM)
    given = ways.ask(replace(block, lse_scope="LOCAL"), Way.STREAM)
    assert local.report.softmax_lse_recomputed
    assert (answer.dv - local.dv).abs().max() > 10 * error_budget(CAUSAL, PARTIAL_SUMS)["dv"]
    assert all(torch.equal(getattr(answer, name), getattr(given, name)) for name in ("dq", "dk", "dv", "dsink"))


@pytest.mark.parametrize("case", [CAUSAL, WINDOW, CROSS], ids=lambda case: case.name)
@pytest.mark.parametrize("variant", ["as_is", "no_lse", "grad_fp32", "fp32"])
def test_a_long_sequence_loses_nothing_in_accumulation(case: Case, variant: str, ways: Ways) -> None:
    """`judge` adds each head's Frobenius error from FROBENIUS_SEQLEN rows on."""
    assert case.seqlen_k >= FROBENIUS_SEQLEN
    asked = VARIANT[variant]
    answer = ways.ask(build_inputs(case, asked), Way.STREAM)
    assert judge(case, solved(asked.of(case)), answer, asked) == []
