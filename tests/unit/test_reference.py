"""The CPU backend gives exact gradients for whatever a problem asks, equal to the bit in any number of threads."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from oracle.budget import judge
from oracle.case import Variant, variants
from oracle.cases import ANSWERED_CASES, BY_NAME, HEAD_DIM_CASES
from oracle.exact import solved
from oracle.geometry import statistics_shape
from oracle.inputs import build_inputs
from oracle.problems import as_given, to_problem

import dqkv_kernels
from dqkv import errors
from dqkv.problem import INPUT_ROLES, Arch, Options, Problem, Window
from dqkv.tensor import DType, Tensor
from dqkv_kernels import inputs, places, plan, reference_flash, reference_tiled, visibility

pytestmark = pytest.mark.usefixtures("one_thread")

FLASH, TILED = "cpu/flash-fp32", "cpu/tiled-fp32"
ROLES = ("dq", "dk", "dv", "dsink")
TORCH_DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}
AS_IS = Variant(name="as_is", reason="what the case says")
CROSSING = (
    "causal_bottom_right_sq_lt_sk",
    "causal_sq_gt_sk",
    "cross_sq100_sk333",
    "det_local_window",
    "gqa_12_3_dv128",
    "mqa_71_1",
    "sink_token_varlen_gqa",
    "sink_token_causal_window",
    "softcap15_varlen",
    "sink_dlse_varlen_empty",
    "tiny_all_options",
    "window_right_minus3",
)


@pytest.fixture
def small_blocks(monkeypatch):
    """Every limit of a block is crossed by problems that the oracle can still write out."""
    monkeypatch.setattr(visibility, "ROWS_UNBOUNDED_LEFT", 48)
    monkeypatch.setattr(visibility, "ROWS_BOUNDED_LEFT", (16, 32))
    monkeypatch.setattr(visibility, "FULL_KEYS_LEAST", 8)
    monkeypatch.setattr(visibility, "KEYS_PER_REGION", 40)
    monkeypatch.setattr(places, "JOB_ROWS", (24, 64))
    monkeypatch.setattr(places, "JOB_BYTES", 2**15)
    monkeypatch.setattr(inputs, "KEYS_KEPT", 64)
    monkeypatch.setattr(reference_tiled, "TILE_ROWS", 20)
    monkeypatch.setattr(reference_tiled, "TILE_KEYS", 24)


def each(rows):
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def request_of(case, variant=AS_IS):
    inputs = build_inputs(case, variant)
    given = {role: getattr(inputs, role) for role in INPUT_ROLES}
    return to_problem(inputs, as_given), {role: tensor for role, tensor in given.items() if tensor is not None}


def answers(problem, *, pad=0):
    """NaN-filled memory for the gradients, every row `pad` elements longer than it must be."""
    memory = {}
    for role, spec in problem.gradients.items():
        wide = torch.full((*spec.shape[:-1], spec.shape[-1] + pad), torch.nan, dtype=TORCH_DTYPES[spec.dtype])
        memory[role] = wide[..., : spec.shape[-1]]
    return memory


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bits(first, second):
    return all(
        (a is b is None) or torch.equal(bits(a), bits(b))
        for a, b in ((getattr(first, role), getattr(second, role)) for role in ROLES)
    )


def case_of(name, **changes):
    return replace(BY_NAME[name], name=f"{name}_{'_'.join(map(str, changes.values()))}", **changes)


# ---- right
@each(ANSWERED_CASES + HEAD_DIM_CASES)
def test_an_answer_is_within_its_budget(row):
    for variant in variants(row):
        problem, tensors = request_of(row, variant)
        before = {role: bits(tensor) for role, tensor in tensors.items()}
        gradients = dqkv_kernels.attention_backward(problem, tensors, answers(problem))
        assert judge(row, solved(variant.of(row)), gradients, variant) == [], variant.name
        assert all(torch.equal(bits(tensor), before[role]) for role, tensor in tensors.items())
        assert gradients.report.softmax_lse_recomputed == (variant.softmax_lse == "absent")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", CROSSING)
def test_blocks_and_their_sums_leave_no_seam(name):
    for variant in variants(BY_NAME[name]):
        problem, tensors = request_of(BY_NAME[name], variant)
        gradients = dqkv_kernels.attention_backward(problem, tensors, answers(problem))
        assert judge(BY_NAME[name], solved(variant.of(BY_NAME[name])), gradients, variant) == [], variant.name


@pytest.mark.parametrize("name", CROSSING)
def test_both_kernels_are_right(name, monkeypatch):
    case = BY_NAME[name]
    problem, tensors = request_of(case)
    monkeypatch.setattr(plan.Plan, "can_flash", False)
    gradients = dqkv_kernels.attention_backward(problem, tensors, answers(problem))
    assert gradients.report.kernel == TILED
    assert judge(case, solved(case), gradients) == []


def test_a_long_sequence_keeps_each_heads_error():
    case = case_of("noncausal_square_128", batch_size=1, seqlen_q=2050, seqlen_k=2050, causal=True, head_dim_v=64)
    problem, tensors = request_of(case)
    assert judge(case, solved(case), dqkv_kernels.attention_backward(problem, tensors)) == []


def test_the_report_says_which_kernel_ran():
    def kernel(case, variant=AS_IS):
        return dqkv_kernels.attention_backward(*request_of(case, variant)).report

    assert kernel(BY_NAME["noncausal_square_128"]).kernel == FLASH
    assert kernel(BY_NAME["softcap10_causal"]).kernel == TILED
    assert kernel(BY_NAME["dense_sk0"]).kernel == "cpu/none"
    report = kernel(BY_NAME["gqa_12_3_dv128"])
    assert (report.arch, report.device, report.softmax_lse_recomputed) == ("cpu", "cpu", False)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-20, 3e4])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_any_finite_scale(scale, softcap):
    case = case_of("tiny_all_options", softmax_scale=scale, softcap=softcap)
    problem, tensors = request_of(case)
    gradients = dqkv_kernels.attention_backward(problem, tensors, answers(problem))
    assert judge(case, solved(case), gradients) == []


# ---- softmax_lse
@pytest.mark.parametrize(
    "name",
    ["cross_sq100_sk333", "causal_sq_gt_sk", "sink_dlse_varlen_empty", "softcap15_varlen", "sink_token_varlen_gqa",
     "varlen_rows_behind_last_offset", "raw_logits_below_minus_5e4", "tiny_all_options", "sink_minus_inf_heads"],
)  # fmt: skip
@pytest.mark.parametrize("blocks", ["large", "small"])
def test_statistics_are_those_of_the_forward(name, blocks, request):
    if blocks == "small":
        request.getfixturevalue("small_blocks")
    case = BY_NAME[name]
    problem, tensors = request_of(case)
    found = dqkv_kernels.softmax_statistics(problem, tensors)
    want = statistics_shape(case, solved(case).softmax_lse.clone()).contiguous()
    assert found.dtype is torch.float32
    assert torch.equal(torch.isneginf(found), torch.isneginf(want))
    seen = torch.isfinite(want)
    size = max(1.0, float(want[seen].abs().max()))
    assert (found.double() - want)[seen].abs().max() < 2e-6 * size


@pytest.mark.parametrize("scale", [0.125, 10.0, 60.0, 300.0])
@pytest.mark.parametrize("sequences", [1, 16], ids=["one", "many"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_absent_statistics_cost_logits_of_thousands_no_accuracy(scale, sequences, is_causal):
    generator = torch.Generator().manual_seed(3)
    rows = 300 // sequences
    q, k, v, dout = (torch.randn(sequences, rows, 3, 64, generator=generator) for _ in range(4))

    def eager(dtype):
        one, two, three, four = (tensor.to(dtype).transpose(1, 2) for tensor in (q, k, v, dout))
        logits = one @ two.transpose(2, 3) * scale
        if is_causal:
            logits = logits.masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(), -torch.inf)
        weights = torch.softmax(logits, -1)
        out = weights @ three
        drops = weights * (four @ three.transpose(2, 3) - (four * out).sum(-1, keepdim=True)) * scale
        parts = drops @ two, drops.transpose(2, 3) @ one, weights.transpose(2, 3) @ four
        return out.transpose(1, 2).float(), [part.transpose(1, 2).double() for part in parts]

    out, exact = eager(torch.float64)
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "out": out.contiguous()}
    options = Options(softmax_scale=scale, window=Window(right=0 if is_causal else None))
    specs = {role: Tensor.dense(DType.FP32, tuple(tensor.shape), None) for role, tensor in tensors.items()}
    found = dqkv_kernels.attention_backward(Problem(**specs, options=options), tensors)
    for role, want, rough in zip(ROLES, exact, eager(torch.float32)[1], strict=False):
        limit = 3 * (rough - want).abs().max() + 2e-6 * want.abs().max()
        assert (getattr(found, role) - want).abs().max() < limit, role


def test_key_blocks_with_the_global_statistic_add_up():
    problem, tensors = request_of(BY_NAME["cross_sq100_sk333"], Variant(name="sum", reason="", grad_dtype="fp32"))
    whole = dqkv_kernels.attention_backward(problem, tensors)
    parts = []
    for first, stop in ((0, 100), (100, 101), (101, 333)):
        block = tensors | {role: tensors[role][:, first:stop] for role in ("k", "v")}
        specs = {role: as_given(tensor) for role, tensor in block.items()}
        parts.append(dqkv_kernels.attention_backward(problem.with_tensors(specs), block))
    torch.testing.assert_close(sum(part.dq for part in parts), whole.dq, rtol=1e-5, atol=1e-5)
    for role in ("dk", "dv"):
        joined = torch.cat([getattr(part, role) for part in parts], 1)
        torch.testing.assert_close(joined, getattr(whole, role), rtol=1e-5, atol=1e-5)


def test_rows_whose_statistic_is_infinite_get_exactly_zero():
    problem, tensors = request_of(BY_NAME["noncausal_square_128"])
    for value in (torch.inf, -torch.inf):
        tensors["softmax_lse"][:, :, 5] = value
        gradients = dqkv_kernels.attention_backward(problem, tensors)
        assert not gradients.dq[:, 5].any()
        assert all(torch.isfinite(getattr(gradients, role)).all() for role in ("dq", "dk", "dv"))


# ---- the same to the bit
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", [*CROSSING, "det_mha_s512", "sink_basic_h6", "dlse_hd256"])
def test_the_number_of_threads_changes_no_bit(name):
    problem, tensors = request_of(BY_NAME[name])
    first = dqkv_kernels.attention_backward(problem, tensors)
    try:
        for count in (2, 3, 8):
            torch.set_num_threads(count)
            assert same_bits(first, dqkv_kernels.attention_backward(problem, tensors)), count
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(1)


def test_where_tensors_lie_changes_no_bit():
    problem, tensors = request_of(BY_NAME["det_mha_s512"])
    first = dqkv_kernels.attention_backward(problem, tensors)
    for shift in (1, 3, 17):
        moved = {}
        for role, tensor in tensors.items():
            moved[role] = tensor.new_empty(tensor.numel() + shift)[shift:].view(tensor.shape)
            moved[role].copy_(tensor)
        assert same_bits(first, dqkv_kernels.attention_backward(problem, moved))


def test_a_call_leaves_torchs_threads_as_they_were():
    problem, tensors = request_of(BY_NAME["varlen_gqa_16_8_d64"])
    torch.set_num_threads(3)
    try:
        dqkv_kernels.attention_backward(problem, tensors)
        seen = []
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert (torch.get_num_threads(), seen) == (3, [3])
    finally:
        torch.set_num_threads(1)


# ---- one sequence and the others
@pytest.mark.parametrize("name", ["varlen_gqa_16_8_d64", "seqused_both_dense", "softcap15_varlen"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("role", ["q", "k", "v", "dout", "out", "softmax_lse"])
def test_a_bad_sequence_reaches_no_other(name, poison, role):
    case = BY_NAME[name]
    problem, tensors = request_of(case)
    clean = dqkv_kernels.attention_backward(problem, tensors)
    target = tensors[role]
    lengths = case.seqlens_k if role in "kv" else case.seqlens_q
    if lengths is None:
        target[0] = poison
        q_rows, k_rows = (slice(1, None),) * 2
    else:
        target[..., : lengths[0]] = poison if role == "softmax_lse" else target[..., : lengths[0]]
        if role != "softmax_lse":
            target[: lengths[0]] = poison
        q_rows, k_rows = slice(case.seqlens_q[0], None), slice(case.seqlens_k[0], None)
    found = dqkv_kernels.attention_backward(problem, tensors, answers(problem))
    assert torch.equal(bits(found.dq[q_rows]), bits(clean.dq[q_rows]))
    assert torch.equal(bits(found.dk[k_rows]), bits(clean.dk[k_rows]))
    assert torch.equal(bits(found.dv[k_rows]), bits(clean.dv[k_rows]))
    if role == "dout" and poison is torch.nan:
        assert found.dv.isnan().any(), "what is wrong must be seen where it is"


def test_hidden_values_that_overflow_weigh_nothing():
    case = case_of("noncausal_square_128", batch_size=1, causal=True)
    problem, tensors = request_of(case)
    clean = dqkv_kernels.attention_backward(problem, tensors)
    # Only the last row sees the last key; for all others dout * v there is beyond fp32, and hidden.
    tensors["v"][:, -1] = 3e38
    tensors["dout"][:, :-1] *= 16
    expected = clean.dq[:, :-1].float() * 16
    tensors["out"][:, -1], tensors["dout"][:, -1] = 0, 0
    found = dqkv_kernels.attention_backward(problem, tensors)
    assert found.report.kernel == TILED
    torch.testing.assert_close(found.dq[:, :-1].float(), expected, rtol=2e-2, atol=2e-2)


# ---- where answers go
@pytest.mark.parametrize("name", ["hd128_dv96", "tiny_all_options", "varlen_rows_behind_last_offset", "dense_batch0"])
def test_answers_fill_given_memory_and_nothing_beside_it(name):
    problem, tensors = request_of(BY_NAME[name])
    want = dqkv_kernels.attention_backward(problem, tensors)
    given = answers(problem, pad=3)
    found = dqkv_kernels.attention_backward(problem, tensors, given)
    assert same_bits(want, found)
    for role, memory in given.items():
        assert getattr(found, role).data_ptr() == memory.data_ptr()
        if memory.numel():
            assert memory.as_strided((3,), (1,), memory.storage_offset() + memory.shape[-1]).isnan().all()


def test_heads_first_memory_takes_answers_too():
    problem, tensors = request_of(BY_NAME["noncausal_square_128"])
    want = dqkv_kernels.attention_backward(problem, tensors)
    shape = problem.q.shape
    heads_first = torch.full((shape[0], shape[2], shape[1], shape[3]), torch.nan, dtype=torch.bfloat16)
    found = dqkv_kernels.attention_backward(problem, tensors, {"dq": heads_first.transpose(1, 2)})
    assert torch.equal(heads_first.transpose(1, 2), want.dq)
    assert same_bits(want, found)


def test_tensors_that_require_gradients_are_only_read():
    problem, tensors = request_of(BY_NAME["noncausal_square_128"])
    for role in ("q", "k", "v"):
        tensors[role].requires_grad_()
    found = dqkv_kernels.attention_backward(problem, tensors)
    assert not found.dq.requires_grad


# ---- stopping
class Stopped(Exception):
    """What a caller's should_stop raises."""


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", ["mqa_71_1", "det_local_window"])
@pytest.mark.parametrize("calls", [0, 1, 5])
@pytest.mark.usefixtures("small_blocks")
def test_should_stop_ends_the_call(threads, name, calls):
    problem, tensors = request_of(BY_NAME[name])
    counted = []

    def says_so():
        counted.append(None)
        return len(counted) > calls

    def raises():
        if says_so():
            raise Stopped

    torch.set_num_threads(threads)
    try:
        with pytest.raises(errors.Cancelled):
            dqkv_kernels.attention_backward(problem, tensors, should_stop=says_so)
        assert len(counted) <= calls + threads
        counted.clear()
        with pytest.raises(Stopped):
            dqkv_kernels.attention_backward(problem, tensors, should_stop=raises)
        with pytest.raises(errors.Cancelled):
            dqkv_kernels.softmax_statistics(problem, tensors, should_stop=lambda: True)
    finally:
        torch.set_num_threads(1)
    assert judge(BY_NAME[name], solved(BY_NAME[name]), dqkv_kernels.attention_backward(problem, tensors)) == []


# ---- refusals
def test_an_arch_without_kernels_is_refused_in_words():
    problem, tensors = request_of(BY_NAME["noncausal_square_128"])
    assert dqkv_kernels.supports(problem) is None
    other = replace(problem, options=Options(arch=Arch.SM80))
    assert "sm80" in dqkv_kernels.supports(other)
    with pytest.raises(errors.ArchUnavailable, match="sm80"):
        dqkv_kernels.attention_backward(other, tensors)


@pytest.mark.parametrize(
    ("role", "change", "error"),
    [
        ("q", lambda q: q[:, :-1], errors.ShapeMismatch),
        ("v", lambda v: v.float(), errors.DTypeMismatch),
        ("softmax_lse", None, errors.ShapeMismatch),
    ],
)
def test_tensors_that_are_not_the_problems_are_refused(role, change, error):
    problem, tensors = request_of(BY_NAME["noncausal_square_128"])
    if change is None:
        del tensors[role]
    else:
        tensors[role] = change(tensors[role])
    with pytest.raises(error) as caught:
        dqkv_kernels.attention_backward(problem, tensors)
    assert caught.value.field == role


def test_memory_that_cannot_hold_an_answer_is_refused():
    problem, tensors = request_of(BY_NAME["noncausal_square_128"])
    with pytest.raises(errors.DTypeMismatch):
        dqkv_kernels.attention_backward(problem, tensors, {"dk": torch.empty(problem.k.shape)})
    with pytest.raises(errors.ShapeMismatch):
        dqkv_kernels.attention_backward(problem, tensors, {"dsink": torch.empty(2)})


# ---- the flash kernel's stand-in for out
def test_the_stand_in_for_out_has_the_row_sums_of_delta():
    torch.manual_seed(0)
    dout = torch.randn(3, 50, 64) * torch.logspace(-7, 7, 50)[:, None]
    delta = torch.randn(3, 50) * torch.logspace(7, -7, 50)
    delta[:, 7], dout[:, 7] = 0, 0
    out = reference_flash.stand_in_for_out(dout, delta)
    sums = (dout.double() * out.double()).sum(-1)
    assert torch.allclose(sums, delta.double(), rtol=5e-7, atol=0)


@pytest.mark.parametrize(
    ("scale", "delta"), [(0.0, 1.0), (1e-30, 1.0), (1.0, torch.nan), (1.0, torch.inf), (1e30, 1.0)]
)
def test_rows_without_a_trustworthy_stand_in_have_none(scale, delta):
    dout, deltas = torch.ones(1, 4, 8), torch.ones(1, 4)
    dout[:, 2] *= scale
    deltas[:, 2] = delta
    assert reference_flash.stand_in_for_out(dout, deltas) is None
