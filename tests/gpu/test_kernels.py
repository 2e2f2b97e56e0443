"""Every kernel of this device's default sets runs at least once, and what it answers is right."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_rig import Gpu
from oracle.budget import judge
from oracle.case import Variant
from oracle.cases import BY_NAME
from oracle.exact import solved

from dqkv_kernels.build import default_set
from dqkv_kernels.key import Kernel
from dqkv_kernels.tiles import ARCH_TARGETS

pytestmark = pytest.mark.gpu

BASE = BY_NAME["causal_bottom_right_sq_lt_sk"]
SOFTCAP = 20.0
TARGET = "sm_90a"
"""The target whose kernels are recorded."""
KEYS = [
    key
    for arch, targets in ARCH_TARGETS.items()
    if TARGET in targets
    for key in default_set(arch, TARGET)
    if key.kernel is Kernel.MAIN_LOOP
]


@pytest.mark.parametrize("lse", ["given", "absent"])
@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_main_loop_and_the_kernels_around_it_are_right(gpu: Gpu, key, lse):
    case = dataclasses.replace(
        BASE,
        name=key.name,
        head_dim=key.head_dim,
        head_dim_v=key.head_dim_v,
        dtype=key.dtype,
        softcap=SOFTCAP if key.softcap else 0.0,
    )
    variant = Variant(
        name="kernels",
        reason="every kernel once",
        grad_dtype=None if key.grad_dtype == key.dtype else "fp32",
        softmax_lse=lse,
    )
    answer = gpu.run(gpu.inputs(case, variant, f"sm{key.arch}"))
    torch.cuda.synchronize()
    assert key.name in gpu.record.kernels
    assert judge(case, solved(case), answer, variant) == []
