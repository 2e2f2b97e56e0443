"""One kernel key to one shared object and its manifest, with CuTe DSL and gcc; needs the compiler, but no GPU."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import find_runtime_libraries, make_fake_stream, make_fake_tensor

from dqkv_kernels.artifacts import ENTRY, MANIFEST_SUFFIX, SOURCE_DISTRIBUTION, source_digest
from dqkv_kernels.device.postprocess import Postprocess
from dqkv_kernels.device.preprocess import Preprocess
from dqkv_kernels.device.sm80.main_loop import MainLoop80
from dqkv_kernels.device.sm90.main_loop import MainLoop90
from dqkv_kernels.device.sm90.wide import WideMainLoop90
from dqkv_kernels.device.sm100.main_loop import MainLoop100
from dqkv_kernels.device.statistics import Statistics
from dqkv_kernels.key import Kernel, KernelKey
from dqkv_kernels.tiles import tile_for

MAIN_LOOPS: dict[str, Any] = {
    "sm80": MainLoop80,
    "sm90": MainLoop90,
    "sm90_wide": WideMainLoop90,
    "sm100": MainLoop100,
    "sm100_wide": MainLoop100,
}
# device code has no types
SIDE_KERNELS: dict[Kernel, Any] = {
    Kernel.STATISTICS: Statistics,
    Kernel.PREPROCESS: Preprocess,
    Kernel.POSTPROCESS: Postprocess,
}
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}


class _Signature:
    """Tensors without memory, of sizes and strides known at run time; equal sizes share one symbol."""

    def __init__(self) -> None:
        names = ("batches_q", "batches_k", "rows_q", "rows_k", "heads_q", "heads_k", "width", "width_v", "tiles")
        self.size = {name: cute.sym_int() for name in names}
        self.size |= {name: cute.sym_int64() for name in ("padded", "accumulator")}

    def tensor(self, dtype: Any, *sizes: str) -> Any:
        """Rows of 16-byte vectors: the last stride is 1, the others are multiples of 16 bytes."""
        shape = tuple(self.size[size] for size in sizes)
        # one symbol a stride: a shared one would demand that they be equal
        strides = (*(cute.sym_int64(divisibility=128 // dtype.width) for _ in shape[1:]), 1)
        return make_fake_tensor(dtype, shape, strides, assumed_align=16)

    def queries(self, dtype: Any, width: str) -> Any:
        """(batches, rows, heads, width) on the queries' side."""
        return self.tensor(dtype, "batches_q", "rows_q", "heads_q", width)

    def keys(self, dtype: Any, width: str) -> Any:
        """(batches, rows, heads, width) on the keys' side."""
        return self.tensor(dtype, "batches_k", "rows_k", "heads_k", width)

    def statistic(self) -> Any:
        """(batches, heads, rows) of any strides and alignment."""
        shape = tuple(self.size[name] for name in ("batches_q", "heads_q", "rows_q"))
        return make_fake_tensor(Float32, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4)

    def padded(self, dtype: Any, size: str) -> Any:
        """One dense row a head: (heads_q, size)."""
        shape = (self.size["heads_q"], self.size[size])
        step = 1 if size == "tiles" else 4
        return make_fake_tensor(dtype, shape, (cute.sym_int64(divisibility=step), 1), assumed_align=4 * step)

    def sequences(self) -> Any:
        """The table of sequences: (batch_size, 8)."""
        return make_fake_tensor(Int64, (cute.sym_int(), 8), (8, 1), assumed_align=16)

    def heads(self) -> Any:
        """One number a query head."""
        return make_fake_tensor(Float32, (self.size["heads_q"],), (1,), assumed_align=4)


def _program(key: KernelKey) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of a key and the arguments that it is traced with."""
    s, dtype, i, f = _Signature(), DTYPES[key.dtype], Int32(1), Float32(1.0)
    if key.kernel is Kernel.STATISTICS:
        tensors = (s.queries(dtype, "width"), s.keys(dtype, "width"), s.heads(), s.statistic(), s.sequences())
        return SIDE_KERNELS[key.kernel](key.head_dim, dtype, bool(key.softcap)), (*tensors, i, f, f, i, i, i, i)
    if key.head_dim_v is None:
        raise ValueError(f"{key.name}: head_dim_v is missing")
    tile = tile_for(key.arch, key.target, key.head_dim, key.head_dim_v)
    if key.kernel is Kernel.PREPROCESS:
        rows = [s.queries(dtype, "width_v") for _ in range(2)]
        given = [s.statistic() for _ in range(3)]
        padded = [s.padded(Float32, size) for size in ("padded", "padded", "accumulator")]
        tiles = [s.padded(Int32, "tiles"), s.padded(Float32, "tiles")]
        return SIDE_KERNELS[key.kernel](tile, dtype), (
            *rows,
            *given,
            s.heads(),
            *padded,
            *tiles,
            s.sequences(),
            i,
            i,
            i,
            i,
        )
    if key.kernel is Kernel.POSTPROCESS:
        outputs = (s.padded(Float32, "accumulator"), s.queries(dtype, "width"), s.sequences())
        return SIDE_KERNELS[key.kernel](tile, dtype), (*outputs, i, Int64(1), f)
    grad = DTYPES[key.grad_dtype or ""]
    inputs = (s.queries(dtype, "width"), s.keys(dtype, "width"), s.keys(dtype, "width_v"), s.queries(dtype, "width_v"))
    padded = [s.padded(Float32, size) for size in ("padded", "padded", "accumulator")]
    answers = (s.padded(Int32, "tiles"), s.keys(grad, "width"), s.keys(grad, "width_v"))
    tensors = (*inputs, *padded, *answers, s.sequences())
    return MAIN_LOOPS[tile.main_loop](tile, dtype, grad, bool(key.softcap)), (*tensors, i, f, f, f, i, i, i, i)


def compile_key(key: KernelKey, directory: Path) -> Path:
    """Builds `<directory>/<key.name>.so` and its manifest, each under a temporary name first; returns the object.

    Raises what the compiler or gcc raises; nothing is left behind then.
    """
    directory.mkdir(parents=True, exist_ok=True)
    program, arguments = _program(key)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        work = Path(scratch)
        options = f"--enable-tvm-ffi --gpu-arch {key.target} --keep-ptx --dump-dir {work}"
        compiled = cute.compile(program, *arguments, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)
        compiled.export_to_c(str(work / "kernel.o"), function_name=ENTRY)
        libraries = find_runtime_libraries(enable_tvm_ffi=True)
        linked = work / "kernel.so"
        subprocess.run(
            ["gcc", "-shared", "-o", str(linked), str(work / "kernel.o"), *libraries, "-Wl,-rpath,$ORIGIN"],  # noqa: S607
            check=True,
        )
        ptx = next(work.glob("*.ptx")).read_bytes().rstrip(b"\0")
        manifest = {
            "key": key.as_dict(),
            "source": source_digest(),
            "compiler": version(SOURCE_DISTRIBUTION),
            "object_sha256": hashlib.sha256(linked.read_bytes()).hexdigest(),
            "ptx_sha256": hashlib.sha256(ptx).hexdigest(),
        }
        described = work / "manifest.json"
        described.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        (work / "kernel.ptx").write_bytes(ptx)
        target = directory / f"{key.name}.so"
        # first: whoever reads meanwhile finds no artifact rather than one that does not fit its manifest
        target.with_suffix(MANIFEST_SUFFIX).unlink(missing_ok=True)
        (work / "kernel.ptx").replace(target.with_suffix(".ptx"))
        linked.replace(target)
        # last: an object without its manifest is not an artifact
        described.replace(target.with_suffix(MANIFEST_SUFFIX))
    return target
