"""How fast is the backward, side by side with its peers in one run on one GPU?

Rows are the cases that the peers are compared on: 16384 tokens, a hidden width of about 2048, head dims from 64 to 256,
with and without a causal mask, and grouped heads. A number is TFLOP/s of the whole backward, of 10 * batch * heads *
seqlen ** 2 * head_dim operations (half under a causal mask). ours is the newest family of kernels that the device runs,
ours_sm80 the mma.sync family; fa2 and cudnn are PyTorch's. The last row is the rate of an 8192 ** 3 bf16 product.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dqkv.problem import Arch, Options, Problem, Window
from dqkv.tensor import DType, Tensor
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.chain import Chain, Workspace

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 16384
HEADS = {64: 32, 96: 20, 128: 16, 192: 10, 256: 8}
SECONDS_A_SAMPLE = 0.08
SAMPLES = 3
MATMUL = 8192


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: batch size, seqlen of both sides, query and key heads, head dim, and whether the mask is causal."""

    b: int
    s: int
    h: int
    hk: int
    d: int
    causal: bool

    @property
    def flops(self) -> float:
        """Operations of the backward's five products."""
        return 10 * self.b * self.h * self.s**2 * self.d / (2 if self.causal else 1)


def cases() -> Iterator[Case]:
    """Every row, in the order of the table."""
    for d, heads in HEADS.items():
        for causal in (False, True):
            for s in (1024, 4096, 16384):
                yield Case(b=TOKENS // s, s=s, h=heads, hk=heads, d=d, causal=causal)
    for causal in (False, True):
        yield Case(b=2, s=8192, h=32, hk=8, d=128, causal=causal)
        yield Case(b=4, s=4096, h=64, hk=8, d=64, causal=causal)


def milliseconds(work: Callable[[], object]) -> float:
    """The median of a few samples, each the mean of many calls without a pause."""
    work()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    count = max(5, min(100, int(SECONDS_A_SAMPLE / max(time.perf_counter() - begun, 1e-5))))
    samples = []
    for _ in range(SAMPLES):
        begun = time.perf_counter()
        for _ in range(count):
            work()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begun) / count * 1e3)
    return sorted(samples)[SAMPLES // 2]


def as_given(tensor: torch.Tensor) -> Tensor[torch.Tensor]:
    """Dtype, shape and strides of a tensor, with the tensor itself as its bytes."""
    dtype = DType.FP32 if tensor.dtype is torch.float32 else DType.BF16
    return Tensor(dtype=dtype, shape=tuple(tensor.shape), strides=tuple(tensor.stride()), data=tensor)


def ours(case: Case, chain: Chain, arch: Arch, tensors: dict[str, torch.Tensor]) -> Callable[[], object]:
    """The chain's backward of a case."""
    options = Options(window=Window(right=0 if case.causal else None), arch=arch)
    problem = Problem(**{role: as_given(tensor) for role, tensor in tensors.items()}, options=options)
    return lambda: chain.backward(problem, tensors)


def peers(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> dict[str, Any]:
    """PyTorch's backwards as calls, and the out and softmax_lse (natural log) that the first of them came with."""
    group = case.h // case.hk
    wide_k, wide_v = (t.repeat_interleave(group, 2) if group > 1 else t for t in (k, v))
    tq, tk, tv, tdo = (t.transpose(1, 2) for t in (q, wide_k, wide_v, dout))
    aten = torch.ops.aten
    out, lse, *rest = aten._scaled_dot_product_flash_attention(tq, tk, tv, 0.0, case.causal, False)
    calls: dict[str, Any] = {
        "fa2": lambda: aten._scaled_dot_product_flash_attention_backward(
            tdo, tq, tk, tv, out, lse, *rest[:4], 0.0, case.causal, *rest[4:6]
        )
    }
    try:
        got = aten._scaled_dot_product_cudnn_attention(tq, tk, tv, None, True, 0.0, case.causal, False)
        c_out, c_lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = got
        calls["cudnn"] = lambda: aten._scaled_dot_product_cudnn_attention_backward(
            tdo, tq, tk, tv, c_out, c_lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, case.causal
        )
    except RuntimeError as refusal:
        print(f"cudnn does not take {case}: {str(refusal).splitlines()[0]}", flush=True)
    return {"calls": calls, "out": out.transpose(1, 2), "softmax_lse": lse}


def measure(case: Case, chain: Chain) -> dict[str, Any]:
    """One row of the table."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(case.b, case.s, heads, case.d, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v, dout = random(case.h), random(case.hk), random(case.hk), random(case.h)
    given = peers(case, q, k, v, dout)
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "out": given["out"], "softmax_lse": given["softmax_lse"]}
    works = {
        "ours": ours(case, chain, Arch.AUTO, tensors),
        "ours_sm80": ours(case, chain, Arch.SM80, tensors),
        **given["calls"],
    }
    row: dict[str, Any] = asdict(case)
    for name, work in works.items():
        try:
            spent = milliseconds(work)
        except RuntimeError as refusal:
            row[name] = None
            row[f"{name}_error"] = str(refusal).splitlines()[0]
            continue
        row[name] = round(case.flops / spent / 1e9, 1)
        row[f"{name}_ms"] = round(spent, 4)
    return row


def main() -> None:
    """Prints a row a case, and writes all of them where --json says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=Path, default=ROOT / "build" / "kernels", help="directory of built kernels")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "backward_h200.json")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    chain = Chain(Artifacts(arguments.kernels), Workspace(device))
    rows: list[dict[str, Any]] = []
    for case in cases():
        rows.append(measure(case, chain))
        print(json.dumps({name: value for name, value in rows[-1].items() if not name.endswith("_ms")}), flush=True)
        torch.cuda.empty_cache()
    a, b = (torch.randn(MATMUL, MATMUL, device=device, dtype=torch.bfloat16) for _ in range(2))
    rows.append({"matmul": round(2 * MATMUL**3 / milliseconds(lambda: a @ b) / 1e9, 1)})
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
