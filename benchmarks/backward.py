"""How fast is the backward, side by side with its peers in one run on one GPU?

Rows are the cases that the peers are compared on: 16384 tokens, a hidden width of about 2048, head dims from 64 to 256,
with and without a causal mask, and grouped heads. A number is TFLOP/s of the whole backward, of 10 * batch * heads *
seqlen ** 2 * head_dim operations (half under a causal mask). ours is the newest family of kernels that the device
runs, ours_sm80 the mma.sync family; the peers are those of peers.py. Everything of a case is measured in turns, a
sample each, and the medians count. The last row is the rate of an 8192 ** 3 bf16 product.

The summary has geometric means of ratios by head_dim: ours over the best peer of each case, ours_sm80 over fa2, and
what determinism leaves of the rate and a softcap costs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import RESULTS, describe
from peers import Tensors, Work, forward, peers

from dqkv.problem import Arch, Options, Problem, Window
from dqkv.tensor import DType, Tensor
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.chain import Chain, Workspace

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 16384
HEADS = {64: 32, 96: 20, 128: 16, 192: 10, 256: 8}
MODES_SEQLEN = 4096
SOFTCAP = 30.0
SECONDS_A_SAMPLE = 0.04
SAMPLES = 5
MATMUL = 8192
PEERS = ("fa2", "cudnn", "fa3", "fa4")


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


def milliseconds(works: dict[str, Work]) -> dict[str, float]:
    """The median of a few samples of each work, taken in turns; a sample is the mean of calls without a pause."""
    counts = {}
    for name, work in works.items():
        work.call()
        counts[name] = max(3, min(100, int(SECONDS_A_SAMPLE / max(_spent(work, 1), 1e-5))))
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(SAMPLES):
        for name, work in works.items():
            samples[name].append(_spent(work, counts[name]) / counts[name] * 1e3)
    return {name: median(values) for name, values in samples.items()}


def _spent(work: Work, count: int) -> float:
    work.wait()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        work.call()
    work.wait()
    return time.perf_counter() - begun


def drawn(case: Case) -> Tensors:
    """Normal numbers, the same in every run."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(case.b, case.s, heads, case.d, device="cuda", dtype=torch.bfloat16, generator=generator)

    return Tensors(q=random(case.h), k=random(case.hk), v=random(case.hk), dout=random(case.h), causal=case.causal)


def ours(tensors: Tensors, chain: Chain) -> Callable[..., Work]:
    """What makes the chain's backward of a case, for options of the problem."""
    out, lse = forward(tensors)
    given = {"q": tensors.q, "k": tensors.k, "v": tensors.v, "dout": tensors.dout, "out": out, "softmax_lse": lse}
    specs = {
        role: Tensor(
            dtype=DType.FP32 if role == "softmax_lse" else DType.BF16,
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            data=tensor,
        )
        for role, tensor in given.items()
    }
    window = Window(right=0 if tensors.causal else None)

    def work(**options: Any) -> Work:
        problem = Problem(**specs, options=Options(window=window, **options))
        return Work(call=lambda: chain.backward(problem, given))

    return work


def measure(case: Case, chain: Chain) -> dict[str, Any]:
    """One row of the table."""
    tensors = drawn(case)
    works, refusals = peers(tensors)
    make = ours(tensors, chain)
    spent = milliseconds({"ours": make(), "ours_sm80": make(arch=Arch.SM80), **works})
    row: dict[str, Any] = asdict(case)
    for name in ("ours", "ours_sm80", *PEERS):
        row[name] = round(case.flops / spent[name] / 1e9, 1) if name in spent else None
        if name in spent:
            row[f"{name}_ms"] = round(spent[name], 4)
        else:
            row[f"{name}_error"] = refusals[name]
    return row


def measure_modes(case: Case, chain: Chain) -> dict[str, Any]:
    """One case in each mode, in milliseconds."""
    make = ours(drawn(case), chain)
    works = {"default": make(), "deterministic": make(deterministic=True), "softcap": make(softcap=SOFTCAP)}
    return {**asdict(case), **{name: round(spent, 4) for name, spent in milliseconds(works).items()}}


def summary(rows: list[dict[str, Any]], modes: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of ratios by head_dim, and over all rows."""

    def over_best(row: dict[str, Any]) -> float | None:
        rates = [row[peer] for peer in PEERS if row[peer]]
        return row["ours"] / max(rates) if row["ours"] and rates else None

    def over_fa2(row: dict[str, Any]) -> float | None:
        return row["ours_sm80"] / row["fa2"] if row["ours_sm80"] and row["fa2"] else None

    return {
        "ours_over_best_peer": _by_width(rows, over_best),
        "ours_sm80_over_fa2": _by_width(rows, over_fa2),
        "deterministic_over_default": _by_width(modes, lambda row: row["default"] / row["deterministic"]),
        "softcap_cost": _by_width(modes, lambda row: row["softcap"] / row["default"]),
    }


def _by_width(rows: list[dict[str, Any]], ratio: Callable[[dict[str, Any]], float | None]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        value = ratio(row)
        if value is not None:
            for name in (str(row["d"]), "all"):
                found.setdefault(name, []).append(value)
    return {name: round(math.exp(sum(map(math.log, values)) / len(values)), 3) for name, values in found.items()}


def measured(what: Iterable[Case], chain: Chain, kind: Callable[[Case, Chain], dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one kind, each printed as it comes."""
    rows = []
    for case in what:
        rows.append(kind(case, chain))
        print(json.dumps({name: value for name, value in rows[-1].items() if not name.endswith("_ms")}), flush=True)
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Prints a row a case, and writes all of them where --json says, and their ratios where --summary says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=Path, default=ROOT / "build" / "kernels", help="directory of built kernels")
    parser.add_argument("--json", type=Path, default=RESULTS / "backward_h200.json")
    parser.add_argument("--summary", type=Path, default=RESULTS / "backward_summary_h200.json")
    parser.add_argument("--seqlen", type=int, help="only the cases of this length")
    parser.add_argument("--head-dim", type=int, help="only the cases of this width")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU that this PyTorch can use: nothing is measured")
        return
    device = torch.device("cuda", 0)
    chain = Chain(Artifacts(arguments.kernels), Workspace(device))
    chosen = [case for case in cases() if arguments.seqlen in (None, case.s) and arguments.head_dim in (None, case.d)]
    rows = measured(chosen, chain, measure)
    modes = measured([case for case in chosen if case.s == MODES_SEQLEN and case.h == case.hk], chain, measure_modes)
    ratios = summary(rows, modes)
    print(json.dumps(ratios, indent=1))
    a, b = (torch.randn(MATMUL, MATMUL, device=device, dtype=torch.bfloat16) for _ in range(2))
    spent = milliseconds({"matmul": Work(call=lambda: a @ b)})["matmul"]
    table = [*rows, {"matmul": round(2 * MATMUL**3 / spent / 1e9, 1)}]
    arguments.json.write_text(json.dumps(table, indent=1) + "\n")
    result = {"machine": {**describe(), "gpu": torch.cuda.get_device_name(device)}, "ratios": ratios, "modes": modes}
    arguments.summary.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
