"""Every answerable case, in every variant of its request, on every family of kernels: within its budget."""

from __future__ import annotations

import pytest
import torch
from gpu_rig import Gpu
from oracle.budget import bitwise_complaints, error_budget, judge
from oracle.case import variants
from oracle.cases import ANSWERED_CASES, HEAD_DIM_CASES
from oracle.exact import solved

pytestmark = pytest.mark.gpu

ARCHS = ("sm80", "sm90")
REPEATS = 3
REQUESTS = [
    pytest.param(case, variant, id=f"{case.name}-{variant.name}")
    for case in ANSWERED_CASES + HEAD_DIM_CASES
    for variant in variants(case)
    if variant.dtype != "fp32"
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("case", "variant"), REQUESTS)
def test_a_request_is_answered_within_its_budget(gpu: Gpu, case, variant, arch):
    inputs = gpu.inputs(case, variant, arch)
    answers = [gpu.run(inputs) for _ in range(REPEATS)]
    torch.cuda.synchronize()
    exact, budget = solved(variant.of(case)), error_budget(case, variant)
    complaints = [text for answer in answers for text in judge(case, exact, answer, variant)]
    assert complaints + bitwise_complaints(case, answers) == []
    gpu.record.errors.setdefault(arch, {})[f"{case.name}-{variant.name}"] = {
        name: _over_budget(answers, name, getattr(exact, name), budget[name]) for name in budget
    }


def _over_budget(answers, name, want, budget):
    if want.numel() == 0:
        return 0.0
    worst = max((getattr(a, name).double().cpu().reshape(want.shape) - want).abs().max().item() for a in answers)
    return round(worst / budget, 4)
