"""Which kernels are gated, and what NVIDIA's assembler says of their PTX: registers, spills, stack and warnings."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from dqkv_kernels.build import default_set
from dqkv_kernels.key import Kernel, KernelKey
from dqkv_kernels.tiles import rows_of

DIRECTORY = Path(__file__).parents[1] / "build" / "kernels"
WHOLE = ((80, "sm_80"), (80, "sm_90a"), (90, "sm_90a"), (100, "sm_100a"))
"""Families and targets whose whole default set is gated; of the others the main loops, whose tiles are their own."""
MAIN_LOOPS = ((80, "sm_86"), (80, "sm_120"))
LANES = (100, "sm_90a")
"""The postprocess of tensor memory's order, for a target that can run it without tensor memory."""


def gated_keys() -> list[KernelKey]:
    """Every key that the gates look at."""
    keys = [key for pair in WHOLE for key in default_set(*pair)]
    for pair in MAIN_LOOPS:
        keys += [key for key in default_set(*pair) if key.kernel is Kernel.MAIN_LOOP and key.dtype == "bf16"]
    return [*keys, *lanes_keys()]


def lanes_keys() -> list[KernelKey]:
    """The postprocess kernels that show the order of tensor memory on a device that has none."""
    return [
        KernelKey(
            kernel=Kernel.POSTPROCESS,
            arch=LANES[0],
            target=LANES[1],
            dtype=dtype,
            head_dim=tile.head_dim,
            head_dim_v=tile.head_dim_v,
        )
        for tile in rows_of(*LANES)
        for dtype in ("bf16", "fp16", "fp32")
    ]


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """The assembler's report on one kernel; bytes a thread."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]


def tool(name: str, wheel: str) -> Path:
    """A program that one of NVIDIA's wheels carries. Raises PackageNotFoundError without the wheel."""
    files = distribution(wheel).files or []
    return next(Path(str(file.locate())) for file in files if file.name == name)


def ptxas() -> Path:
    """NVIDIA's assembler. Raises PackageNotFoundError without its wheel."""
    return tool("ptxas", "nvidia-cuda-nvcc")


def disassemble(ptx: Path, target: str, scratch: Path) -> list[str]:
    """The machine code's instructions, one name each, modifiers included; scratch: an empty folder."""
    cubin = scratch / "kernel.cubin"
    subprocess.run([str(ptxas()), f"-arch={target}", str(ptx), "-o", str(cubin)], check=True, capture_output=True)
    command = [str(tool("nvdisasm", "nvidia-cuda-nvdisasm")), "-c", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text, re.MULTILINE)


def assemble(ptx: Path, target: str) -> Assembly:
    """Assembles for a target and reads the report. Raises CalledProcessError when the assembler refuses the PTX."""
    command = [str(ptxas()), "-v", f"-arch={target}", str(ptx), "-o", "/dev/null"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr

    def total(pattern: str) -> int:
        return sum(int(number) for number in re.findall(pattern, text))

    return Assembly(
        registers=total(r"Used (\d+) registers"),
        stack_bytes=total(r"(\d+) bytes stack frame"),
        spill_bytes=total(r"(\d+) bytes spill (?:stores|loads)"),
        warnings=tuple(line for line in text.splitlines() if "warning" in line.lower()),
    )
