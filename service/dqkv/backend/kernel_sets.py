"""Which families of kernels a GPU can run: those of which every kernel is built, whole and of this source."""

from __future__ import annotations

from dataclasses import dataclass

from dqkv.errors import ArtifactForeign, ArtifactMissing
from dqkv.problem import Arch
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.build import default_set
from dqkv_kernels.key import Kernel, KernelKey
from dqkv_kernels.launch_plan import ARCHS, target_of
from dqkv_kernels.tiles import ARCH_TARGETS, STATISTICS_ARCH


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """One family on one device: `fault` says in words why it is not to be used, "" when it is."""

    arch: Arch
    fault: str


def kernel_sets(capability: tuple[int, int], artifacts: Artifacts) -> list[KernelSet]:
    """Every family that a compute capability runs, best first, with what is wrong with its kernels.

    A family with a kernel missing is not used at all: a server that answers some shapes alone cannot say which.
    Raises ArchUnavailable when the compute capability has no kernels.
    """
    target = target_of(capability)
    families = sorted(
        ((number, arch) for arch, number in ARCHS.items() if target in ARCH_TARGETS[number]), reverse=True
    )
    return [KernelSet(arch=arch, fault=_fault(number, target, artifacts)) for number, arch in families]


def _fault(number: int, target: str, artifacts: Artifacts) -> str:
    keys = _keys(number, target)
    missing, foreign = [], []
    for key in keys:
        try:
            artifacts.verify(key)
        except ArtifactMissing:
            missing.append(key.name)
        except ArtifactForeign:
            foreign.append(key.name)
    said = []
    if missing:
        said.append(f"{len(missing)} of its {len(keys)} kernels are not built")
    if foreign:
        said.append(f"{len(foreign)} of its {len(keys)} kernels are damaged or of another version ({foreign[0]})")
    if not said:
        return ""
    archs = ",".join(str(each) for each in sorted({number, STATISTICS_ARCH}))
    return f"{' and '.join(said)}: `dqkv kernels build --arch {archs} --target {target}` builds them"


def _keys(number: int, target: str) -> list[KernelKey]:
    """The kernels of a family: its own, and those that recompute softmax_lse, which all families share."""
    shared = [key for key in default_set(STATISTICS_ARCH, target) if key.kernel is Kernel.STATISTICS]
    return sorted({*default_set(number, target), *shared})
