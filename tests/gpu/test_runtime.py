"""What holds over several calls: determinism, streams at once, changing lengths, memory of the caller's."""

from __future__ import annotations

import dataclasses
import multiprocessing
import weakref

import pytest
import torch
from gpu_rig import Gpu
from oracle.budget import bitwise_complaints, judge
from oracle.case import AS_IS
from oracle.cases import ANSWERED_CASES, BY_NAME
from oracle.exact import solved
from oracle.geometry import statistics_shape
from oracle.problems import as_given, to_problem

from dqkv import errors
from dqkv.errors import ArtifactMissing
from dqkv.problem import INPUT_ROLES
from dqkv_kernels import attention_backward, softmax_statistics
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.build import build, default_set
from dqkv_kernels.chain import Chain, Workspace
from dqkv_kernels.dtypes import TORCH_DTYPES
from dqkv_kernels.key import Kernel

pytestmark = pytest.mark.gpu

ARCHS = ("sm80", "sm90")
DETERMINISTIC = [case for case in ANSWERED_CASES if "BITWISE" in case.checks]
RUNS = 1000


def request_of(gpu, name, arch="auto"):
    inputs = gpu.inputs(BY_NAME[name], AS_IS, arch)
    tensors = {role: getattr(inputs, role) for role in INPUT_ROLES if getattr(inputs, role) is not None}
    return to_problem(inputs, as_given), tensors


def new_chain(gpu):
    return Chain(gpu.artifacts, Workspace(gpu.device))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", DETERMINISTIC, ids=lambda case: case.name)
def test_a_deterministic_answer_is_the_same_to_the_bit_over_a_thousand_runs(gpu: Gpu, case, arch):
    inputs = gpu.inputs(case, AS_IS, arch)
    first = gpu.run(inputs)
    for _ in range(RUNS // 50):
        answers = [first, *(gpu.run(inputs) for _ in range(50))]
        assert bitwise_complaints(case, answers) == []
    gpu.record.facts["deterministic_runs"] = RUNS


@pytest.mark.parametrize("arch", ARCHS)
def test_two_streams_at_once_do_not_disturb_each_other(gpu: Gpu, arch):
    names = ("det_mha_s512", "det_local_window")
    requests = [request_of(gpu, name, arch) for name in names]
    alone = [gpu.answer(*request, gpu.chain) for request in requests]
    torch.cuda.synchronize()
    streams, chains = [torch.cuda.Stream() for _ in names], [new_chain(gpu) for _ in names]
    together: list[list] = [[], []]
    for _ in range(50):
        for i, request in enumerate(requests):
            with torch.cuda.stream(streams[i]):
                together[i].append(gpu.answer(*request, chains[i]))
    torch.cuda.synchronize()
    for name, first, others in zip(names, alone, together, strict=True):
        assert bitwise_complaints(BY_NAME[name], [first, *others]) == []


@pytest.mark.parametrize("arch", ARCHS)
def test_lengths_may_change_with_every_call(gpu: Gpu, arch):
    base = BY_NAME["noncausal_square_128"]
    for seqlen in (5, 300, 17, 129, 64, 1, 257):
        case = dataclasses.replace(base, name=f"lengths_{seqlen}", seqlen_q=seqlen, seqlen_k=seqlen, causal=True)
        answer = gpu.run(gpu.inputs(case, AS_IS, arch))
        assert judge(case, solved(case), answer) == []


@pytest.mark.parametrize("name", ["hd128_dv96", "varlen_tile_straddle", "seqused_both_dense"])
def test_answers_go_into_memory_of_any_strides_and_nothing_else_is_written(gpu: Gpu, name):
    problem, tensors = request_of(gpu, name)
    whole = {}
    for role, spec in problem.gradients.items():
        wide = torch.full(
            (*spec.shape[:-1], spec.shape[-1] + 9), 7.0, dtype=TORCH_DTYPES[spec.dtype], device=gpu.device
        )
        whole[role] = wide
    given = {role: wide[..., 1 : 1 + problem.gradients[role].shape[-1]] for role, wide in whole.items()}
    answers = attention_backward(problem, tensors, given, chain=gpu.chain)
    dense = gpu.answer(problem, tensors, gpu.chain)
    for role, wide in whole.items():
        assert getattr(answers, role).data_ptr() == given[role].data_ptr()
        if role != "dq":  # sums of dq are atomic: their order, and so their rounding, may differ
            assert torch.equal(given[role], getattr(dense, role))
        assert (wide[..., :1] == 7.0).all()
        assert (wide[..., 1 + given[role].shape[-1] :] == 7.0).all()


def test_a_workspace_is_not_allocated_again_for_the_same_problem(gpu: Gpu):
    request = request_of(gpu, "hd128_dv96")
    chain = new_chain(gpu)
    gpu.answer(*request, chain)
    before = {name: buffer.data_ptr() for name, buffer in chain.workspace.buffers.items()}
    gpu.answer(*request, chain)
    assert {name: buffer.data_ptr() for name, buffer in chain.workspace.buffers.items()} == before


def test_a_workspace_that_grows_gives_back_what_it_had(gpu: Gpu):
    chain = new_chain(gpu)
    gpu.answer(*request_of(gpu, "tiny_all_options"), chain)
    before = weakref.ref(chain.workspace.buffers["dq_accum"])
    gpu.answer(*request_of(gpu, "hd256_noncausal_fp16"), chain)
    assert before() is None
    gpu.answer(*request_of(gpu, "tiny_all_options"), chain)


def test_a_kernel_that_was_not_built_is_refused_before_any_launch(gpu: Gpu, tmp_path):
    problem, tensors = request_of(gpu, "hd128_dv96")
    with pytest.raises(ArtifactMissing, match="dqkv kernels build"):
        attention_backward(problem, tensors, chain=Chain(Artifacts(tmp_path), Workspace(gpu.device)))


@pytest.mark.parametrize("arch", ["sm100", "cpu"])
def test_an_arch_that_this_device_does_not_run_is_refused(gpu: Gpu, arch):
    problem, tensors = request_of(gpu, "hd128_dv96", arch)
    with pytest.raises(errors.ArchUnavailable, match=arch):
        attention_backward(problem, tensors, chain=gpu.chain)


@pytest.mark.parametrize(
    "name", ["varlen_tile_straddle", "sink_dlse_varlen_empty", "softcap50_window_gqa", "dense_sk0"]
)
def test_statistics_are_the_exact_log_of_the_sum_of_exponentials(gpu: Gpu, name):
    case = BY_NAME[name]
    problem, tensors = request_of(gpu, name)
    got = softmax_statistics(problem, tensors, chain=gpu.chain).double().cpu()
    want = statistics_shape(case, solved(case).softmax_lse)
    assert got.shape == want.shape
    assert torch.equal(torch.isfinite(got), torch.isfinite(want))
    alive = torch.isfinite(want)
    assert torch.allclose(got[alive], want[alive], atol=2e-5, rtol=2e-6)


def test_the_report_says_what_ran(gpu: Gpu):
    for arch in ARCHS:
        problem, tensors = request_of(gpu, "hd128_dv96", arch)
        report = attention_backward(problem, tensors, chain=gpu.chain).report
        assert report.arch == arch
        assert report.kernel.startswith(f"main_loop-arch{arch[2:]}-")
        assert not report.softmax_lse_recomputed


def test_a_chain_is_captured_in_a_graph_and_replayed_on_other_numbers(gpu: Gpu):
    problem, tensors = request_of(gpu, "det_mha_s512")
    chain, stream = new_chain(gpu), torch.cuda.Stream()
    answers = {
        role: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=gpu.device)
        for role, spec in problem.gradients.items()
    }
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention_backward(problem, tensors, answers, chain=chain)  # loads its kernels and takes its memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        attention_backward(problem, tensors, answers, chain=chain)
    tensors["dout"].mul_(-2.0)
    expected = gpu.answer(problem, tensors, gpu.chain)
    for answer in answers.values():
        answer.fill_(float("nan"))
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    for role, answer in answers.items():
        assert torch.equal(answer, getattr(expected, role))


def test_a_process_forked_after_cuda_began_builds_without_it(gpu: Gpu, tmp_path):
    torch.zeros(1, device=gpu.device)
    key = next(key for key in default_set(90, "sm_90a") if key.kernel is Kernel.POSTPROCESS)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send([built.error for built in build([key], tmp_path)]))
    child.start()
    try:
        assert ours.poll(60.0), "the forked process hangs"
        (error,) = ours.recv()
    finally:
        child.kill()
        child.join()
    # where there is no compiler it says so
    assert error == "" or "No module named 'cutlass'" in error
