"""How fast the CPU backend is against PyTorch's own attention backward, and how its memory grows.

    python benchmarks/cpu_backend.py [--quick] [--only WORDS]

Each row times a problem computed by `dqkv_kernels.attention_backward` and the backward of PyTorch's
scaled_dot_product_attention on the same values, interleaved in pairs that start with either side in turn; the ratio
is the median over the pairs of PyTorch's time by ours, with its quartiles, and beside it the load of the machine then:
other work on it disturbs both sides. Ours gets dense (batch, rows, heads, head_dim) tensors and writes into memory it
is given; PyTorch gets heads-first contiguous copies, made before, which is the layout it is fastest in, and with 16-bit
requests these copies are fp32, so that both sum in fp32. Where PyTorch has no such option the row says what the peer
leaves out. Results go to benchmarks/results/cpu_backend.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from machine import write_result

from dqkv.problem import Lengths, Options, Problem, Window
from dqkv.tensor import DType, Tensor
from dqkv_kernels import attention_backward
from dqkv_kernels.dtypes import TORCH_DTYPES

HEADS = 32
KERNEL_TARGET = 0.95
"""Least ratio where the backend calls the kernel that PyTorch calls."""
ELSEWHERE_TARGET = 1.0
PAUSE_S = 0.03
"""Before each sample: PyTorch's idle threads spin for about 10 ms, on the cores that the next sample is to use."""

Tensors = dict[str, torch.Tensor]
Measure = Callable[[Problem[Any], Tensors, Tensors], str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A problem to time: `keys` of one sequence, or of `parts` packed ones; `peer` says how PyTorch's work differs."""

    name: str
    keys: int
    queries: float = 1.0
    head_dim: int = 64
    head_dim_v: int | None = None
    kv_heads: int = HEADS
    window: Window = field(default_factory=Window)
    dtype: DType = DType.FP32
    softcap: float = 0.0
    parts: tuple[int, ...] = ()
    without: tuple[str, ...] = ()
    dlse: bool = False
    peer: str = ""
    target: float = ELSEWHERE_TARGET

    @property
    def seqlen_q(self) -> int:
        """Queries of the sequence, or of all sequences."""
        return int(self.keys * self.queries)

    @property
    def cu_seqlens(self) -> tuple[int, ...] | None:
        """Where packed sequences begin and end; None for a dense one."""
        return tuple(self.keys * part // self.parts[-1] for part in self.parts) or None

    @property
    def width_v(self) -> int:
        """head_dim_v."""
        return self.head_dim_v or self.head_dim


CAUSAL = Window(right=0)
# fmt: off
ELSEWHERE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("delta for out, full", {"without": ("out",)}),
    ("delta for out, causal, head_dim 128", {"head_dim": 128, "window": CAUSAL, "without": ("out",)}),
    ("dlse, full", {"dlse": True, "peer": "no dlse"}),
    ("window 256 back", {"window": Window(left=256, right=0)}),
    ("window 64 both ways, 16 sink tokens, head_dim 128",
     {"head_dim": 128, "window": Window(left=64, right=64, sink_token_length=16)}),
    ("8 key heads, causal", {"kv_heads": 8, "window": CAUSAL}),
    ("1 key head, full", {"kv_heads": 1}),
    ("half as many queries, causal", {"queries": 0.5, "window": CAUSAL}),
    ("half as many queries, full", {"queries": 0.5}),
    ("head_dim 192, head_dim_v 128, causal", {"head_dim": 192, "head_dim_v": 128, "window": CAUSAL}),
    ("packed, 4 sequences, causal", {"parts": (0, 1, 4, 9, 16), "window": CAUSAL, "peer": "one call a sequence"}),
    ("softcap, causal, head_dim 128",
     {"head_dim": 128, "window": CAUSAL, "softcap": 30.0, "peer": "eager with softcap"}),
    ("softmax_lse absent, full", {"without": ("softmax_lse",), "peer": "forward and backward"}),
)
# fmt: on
"""What PyTorch's kernel does not compute as it is: the fields of each row beside the number of keys."""


def plain_rows(target: float) -> list[Row]:
    """What PyTorch's kernel computes as it is: head_dim 64 and 128, full and causal, in fp32 and bf16."""
    return [
        Row(
            name=f"{dtype} {'causal' if window == CAUSAL else 'full'}, head_dim {head_dim}",
            keys=keys,
            head_dim=head_dim,
            window=window,
            dtype=dtype,
            target=target,
        )
        for dtype in (DType.FP32, DType.BF16)
        for keys in (1024, 2048, 4096)
        for head_dim in (64, 128)
        for window in (Window(), CAUSAL)
    ]


def rows() -> list[Row]:
    """All rows: first those that PyTorch's kernel computes as they are, then the rest of what the backend takes."""
    same = [row for row in plain_rows(KERNEL_TARGET) if row.dtype is DType.FP32 or row.keys < 4096]
    return same + [Row(name=name, keys=keys, **fields) for keys in (1024, 2048) for name, fields in ELSEWHERE]


# ---- ours
def in_process(problem: Problem[Any], tensors: Tensors, gradients: Tensors) -> str:
    """The backend called as the server's worker calls it; returns the kernel that ran."""
    return attention_backward(problem, tensors, gradients).report.kernel


def request(row: Row, values: Tensors) -> tuple[Problem[Any], Tensors, Tensors]:
    """The row's problem, its tensors (batch, rows, heads, width) or packed, and NaN-filled memory for answers."""
    dtype = TORCH_DTYPES[row.dtype]
    tensors = {role: tensor.to(dtype) for role, tensor in values.items() if role in ("q", "k", "v", "dout", "out")}
    tensors |= {role: values[role] for role in ("softmax_lse", "dlse", "delta") if role in values}
    tensors.pop("delta" if "out" not in row.without else "out")
    if row.cu_seqlens is not None:
        tensors = {role: tensor[0] for role, tensor in tensors.items()}
    for role in row.without:
        tensors.pop(role, None)
    lengths = Lengths(cu_seqlens=row.cu_seqlens)
    problem: Problem[Any] = Problem(
        **{role: _spec(tensor) for role, tensor in tensors.items()},  # type: ignore[arg-type]
        queries=lengths,
        keys=lengths,
        options=Options(window=row.window, softcap=row.softcap),
    )
    sources = {"dq": "q", "dk": "k", "dv": "v"}
    return problem, tensors, {role: torch.full_like(tensors[of], torch.nan) for role, of in sources.items()}


def _spec(tensor: torch.Tensor) -> Tensor[None]:
    kinds = {kind: dtype for dtype, kind in TORCH_DTYPES.items()}
    return Tensor(dtype=kinds[tensor.dtype], shape=tuple(tensor.shape), strides=tuple(tensor.stride()), data=None)


# ---- the peer
class Peer:
    """PyTorch's attention on heads-first fp32 copies, its forward done where only the backward is asked for."""

    def __init__(self, row: Row, values: Tensors) -> None:
        self._row = row
        self._bounds = row.cu_seqlens or (0, row.seqlen_q)
        self._graphs = [self._forward(part) for part in self._parts(values)]

    def backward(self) -> None:
        """dq, dk and dv of every sequence; the forward too where softmax_lse is recomputed."""
        for leaves, out, dout in self._graphs:
            result = self._attend(leaves) if "softmax_lse" in self._row.without else out
            torch.autograd.grad(result, leaves, dout, retain_graph=True)

    def _parts(self, values: Tensors) -> list[Tensors]:
        heads_first = {role: values[role].transpose(1, 2).contiguous() for role in ("q", "k", "v", "dout")}
        if self._row.cu_seqlens is None:
            return [heads_first]
        spans = zip(self._bounds, self._bounds[1:], strict=False)
        return [{role: t[:, :, a:b].contiguous() for role, t in heads_first.items()} for a, b in spans]

    def _forward(self, part: Tensors) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        leaves = [part[role].requires_grad_() for role in ("q", "k", "v")]
        return leaves, self._attend(leaves), part["dout"]

    def _attend(self, leaves: list[torch.Tensor]) -> torch.Tensor:
        q, k, v = leaves
        row = self._row
        if row.softcap:
            logits = torch.tanh(q @ k.transpose(2, 3) * (row.head_dim**-0.5 / row.softcap)) * row.softcap
            return torch.softmax(logits.masked_fill(~visible(row, q.shape[2], k.shape[2]), -torch.inf), -1) @ v
        is_square_causal = row.window == CAUSAL and q.shape[2] == k.shape[2]
        is_full = row.window == Window()
        mask = None if is_full or is_square_causal else visible(row, q.shape[2], k.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_square_causal, enable_gqa=row.kv_heads != HEADS
        )


def visible(row: Row, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """bool (seqlen_q, seqlen_k): which keys a query sees."""
    i = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if row.window.left is not None:
        seen &= (j >= i - row.window.left) | (j < row.window.sink_token_length)
    if row.window.right is not None:
        seen &= j <= i + row.window.right
    return seen


# ---- timing
def values_of(row: Row) -> Tensors:
    """Random tensors (1, rows, heads, width), rounded to the row's dtype, with the out and softmax_lse they lead to."""
    torch.manual_seed(0)
    shapes = {
        "q": (row.seqlen_q, HEADS, row.head_dim),
        "k": (row.keys, row.kv_heads, row.head_dim),
        "v": (row.keys, row.kv_heads, row.width_v),
        "dout": (row.seqlen_q, HEADS, row.width_v),
    }
    rounded = TORCH_DTYPES[row.dtype]
    values = {role: torch.randn(1, *shape).to(rounded).float() for role, shape in shapes.items()}
    # Times do not depend on these values; any that keep every weight finite do.
    values["out"] = torch.randn(1, *shapes["dout"]).to(rounded).float()
    values["softmax_lse"] = torch.full((1, HEADS, row.seqlen_q), 8.0)
    values["delta"] = (values["dout"] * values["out"]).sum(-1).transpose(1, 2).contiguous()
    if row.dlse:
        values["dlse"] = torch.randn(1, HEADS, row.seqlen_q)
    return values


def measure(row: Row, pairs: int, ours: Measure) -> dict[str, Any]:
    """Medians of both sides in ms, the ratio's median and quartiles over the pairs, and the kernel that ran."""
    values = values_of(row)
    peer = Peer(row, values)
    problem, tensors, gradients = request(row, values)
    kernel = ours(problem, tensors, gradients)
    peer.backward()
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: ours(problem, tensors, gradients),
        "torch": peer.backward,
    }
    for pair in range(pairs):
        for side in sorted(sides, reverse=bool(pair % 2)):
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            sides[side]()
            times[side].append(time.perf_counter() - began)
    ratios = [theirs / mine for theirs, mine in zip(times["torch"], times["ours"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "row": row.name,
        "seqlen": row.keys,
        "peer": row.peer or "the same",
        "kernel": kernel,
        "torch_ms": round(statistics.median(times["torch"]) * 1e3, 1),
        "ours_ms": round(statistics.median(times["ours"]) * 1e3, 1),
        "ratio": round(middle, 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
        "pairs": pairs,
        "load": round(os.getloadavg()[0], 1),
        "target": row.target,
    }


def table(chosen: Iterable[Row], pairs: int, ours: Measure) -> list[dict[str, Any]]:
    """Measures each row and prints it when it is done; returns what was found."""
    found = []
    print(
        f"{'problem (32 heads)':<62}{'kernel':<16}{'torch ms':>9}{'ours ms':>9}  ratio  quartiles  target  load  peer"
    )
    for row in chosen:
        result = measure(row, pairs, ours)
        found.append(result)
        low, high = result["ratio_quartiles"]
        print(
            f"{f'{row.name}, seqlen {row.keys}':<62}{result['kernel']:<16}{result['torch_ms']:>9}{result['ours_ms']:>9}"
            f"{result['ratio']:>7.2f}  {low:.2f}-{high:.2f}{row.target:>8}{result['load']:>6}  {result['peer']}",
            flush=True,
        )
    return found


# ---- memory
def peak_memory(seqlens: list[int]) -> list[dict[str, Any]]:
    """MiB that one backward adds to a process beyond its inputs and answers; each seqlen in a process of its own."""
    context = multiprocessing.get_context("spawn")
    found = []
    for name, window in (("causal", CAUSAL), ("window 256 back", Window(left=256, right=0))):
        for seqlen in seqlens:
            with context.Pool(1) as pool:
                extra = pool.apply(_peak_of, (Row(name=name, keys=seqlen, window=window, dtype=DType.BF16),))
            found.append({"row": f"bf16 {name}", "seqlen": seqlen, "extra_mib": round(extra / 2**20, 1)})
    return found


def _peak_of(row: Row) -> int:
    warm = request(small := Row(name="warm", keys=64), values_of(small))
    in_process(*warm)
    problem, tensors, gradients = request(row, values_of(row))
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak starts again from what is resident now
    before = _resident()
    in_process(problem, tensors, gradients)
    return max(0, _peak() - before)


def _status(key: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seqlen 1024 only, 3 pairs, memory to 4096")
    parser.add_argument("--only", default="", help="rows whose name holds these words")
    arguments = parser.parse_args()
    chosen = [row for row in rows() if arguments.only in row.name and (row.keys <= 1024 or not arguments.quick)]
    found = table(chosen, 3 if arguments.quick else 7, in_process)
    memory = (
        [] if arguments.only else peak_memory([1024, 2048, 4096] if arguments.quick else [2**n for n in range(10, 15)])
    )
    for item in memory:
        print(f"peak beyond inputs and answers, {item['row']}, seqlen {item['seqlen']:>6}: {item['extra_mib']:>8} MiB")
    if not arguments.only and not arguments.quick:
        write_result("cpu_backend", {"rows": found, "memory": memory})


if __name__ == "__main__":
    main()
