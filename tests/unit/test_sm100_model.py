"""The main loop for tensor memory, run on the host from its own tables, answers every case within its budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracle.budget import judge
from oracle.case import AS_IS, variants
from oracle.cases import ANSWERED_CASES, BY_NAME, HEAD_DIM_CASES
from oracle.exact import solved
from oracle.inputs import build_inputs
from sm100.answer import answer, program_of, row_of
from sm100.model import Stuck

from dqkv_kernels.device.sm100.operand import DEPTH, ROWS
from dqkv_kernels.device.sm100.program import Program, Role, Wait

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [case for case in ANSWERED_CASES + HEAD_DIM_CASES if case.dtype != "fp32"]
WALKS = ("det_hd256_causal", "gqa_12_3_dv128", "softcap15_varlen", "sink_token_varlen_gqa")
"""Cases with several steps a CTA, run in more orders of events than one."""
SEEDS = range(4)
ROUNDS = 24


def shortcomings(case, seed=0, program=None):
    try:
        return judge(case, solved(case), answer(build_inputs(case), seed, program))
    except Stuck as stuck:
        return [str(stuck)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_answered_within_its_budget(case):
    assert AS_IS in variants(case)
    assert shortcomings(case) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", WALKS)
def test_the_order_in_which_roles_take_turns_does_not_matter(name, seed):
    assert shortcomings(BY_NAME[name], seed) == []


def table(name):
    case = BY_NAME[name]
    return program_of(row_of(case.head_dim, case.head_dim_v))


def product(program, act, **changes):
    rows = tuple(replace(row, **changes) if row.act == act else row for row in program.products)
    return replace(program, products=rows)


def operand(program, name, **changes):
    rows = tuple(replace(row, **changes) if row.name == name else row for row in program.operands)
    return replace(program, operands=rows)


def slot(program, name, *parts):
    rows = tuple(replace(row, parts=parts) if row.name == name else row for row in program.slots)
    return replace(program, slots=rows)


def without_wait(program, role, barrier):
    steps = tuple(step for step in program.each[role] if not (isinstance(step, Wait) and step.barrier == barrier))
    assert len(steps) < len(program.each[role])
    return replace(program, each={**program.each, role: steps})


class Hasty(Program):
    """Lets a copy run on that may read the first buffer."""

    def copies_running(self, stage):
        return self.stages_dq - 1


NARROW, WIDE = "det_mha_s512", "det_hd256_causal"
MUTATIONS = {
    "S of V": (NARROW, lambda p: product(p, "s", a="v")),
    "dP of Q": (NARROW, lambda p: product(p, "dp", b="q")),
    "dV of Q": (NARROW, lambda p: product(p, "dv", b="q")),
    "dK of dO": (NARROW, lambda p: product(p, "dk", b="dout")),
    "dQ of dS the wrong way round": (NARROW, lambda p: product(p, "dq", a_major=DEPTH)),
    "dK of dS the wrong way round": (NARROW, lambda p: product(p, "dk", a_major=ROWS)),
    "dV not summed": (NARROW, lambda p: product(p, "dv", sums=False)),
    "dQ summed": (NARROW, lambda p: product(p, "dq", sums=True)),
    "lanes the other way round": (NARROW, lambda p: replace(p, lanes="queries")),
    "dQ over S": (NARROW, lambda p: slot(p, "dq", (0, 128))),
    "dK over dP": (NARROW, lambda p: slot(p, "dk", (256, 128))),
    "dV without P": (NARROW, lambda p: without_wait(p, Role.MULTIPLY, "p_full")),
    "dK without dS": (NARROW, lambda p: without_wait(p, Role.MULTIPLY, "ds_full")),
    "dP over dQ": (NARROW, lambda p: without_wait(p, Role.MULTIPLY, "dq_empty")),
    "S not waited for": (NARROW, lambda p: without_wait(p, Role.SOFTMAX, "s_full")),
    "dP not waited for": (NARROW, lambda p: without_wait(p, Role.SOFTMAX, "dp_full")),
    "dQ not waited for": (NARROW, lambda p: without_wait(p, Role.REDUCE, "dq_full")),
    "Q written over": (NARROW, lambda p: without_wait(p, Role.LOAD, "q_empty")),
    "dO written over": (NARROW, lambda p: without_wait(p, Role.LOAD, "dout_empty")),
    "one part of dV for both": (WIDE, lambda p: product(p, "dv", a_column=0)),
    "one part of dQ for both": (WIDE, lambda p: product(p, "dq", b_column=0)),
    "parts of dQ over each other": (WIDE, lambda p: slot(p, "dq", (384, 128), (384, 128))),
    "keys of 128": (WIDE, lambda p: replace(p, tile_n=128)),
    "a buffer of dQ written over": ("mqa_5_1_odd_heads_sk_tail", lambda p: Hasty(**vars(p))),
    "P written over dQ": (WIDE, lambda p: without_wait(p, Role.SOFTMAX, "staged")),
    "wide S over dQ": (WIDE, lambda p: without_wait(p, Role.MULTIPLY, "dq_empty")),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_table_gives_a_wrong_answer(name):
    case, mutate = MUTATIONS[name]
    mutated = mutate(table(case))
    try:
        assert any(shortcomings(BY_NAME[case], seed, mutated) for seed in range(ROUNDS))
    except (RuntimeError, KeyError, IndexError) as error:
        # shapes that no longer fit are found, too
        assert str(error)  # noqa: PT017
