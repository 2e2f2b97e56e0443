"""Which families of kernels a GPU can run: those whose every kernel is built, whole and of this source, or can be."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dqkv.backend.proof import lack_of_proof
from dqkv.errors import ArtifactForeign, ArtifactMissing
from dqkv.problem import Arch
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.build import default_set
from dqkv_kernels.key import Kernel, KernelKey
from dqkv_kernels.launch_plan import ARCHS, target_of
from dqkv_kernels.on_demand import OnDemandArtifacts
from dqkv_kernels.tiles import ARCH_TARGETS, UNPROVEN_ARCHS, statistics_arch

READERS = 8
"""Threads that read and digest kernels: a start waits for them, on a cold disk for each file."""


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """One family on one device: `fault` says in words why it is not to be used, "" when it is.

    is_unproven: whether only its selftest on this device is lacking.
    """

    arch: Arch
    fault: str
    is_unproven: bool = False


def artifacts_in(kernels: Path, *, builds: bool) -> Artifacts:
    """The kernels in a directory; builds: what it lacks is built there once it is needed."""
    return OnDemandArtifacts(kernels) if builds else Artifacts(kernels)


def kernel_sets(capability: tuple[int, int], artifacts: Artifacts, device: Callable[[], str]) -> list[KernelSet]:
    """Every family that a compute capability runs, best first, with what is wrong with its kernels.

    device tells the UUID of the GPU; it is asked where a family has to prove itself there.

    A family with a kernel missing is not used at all, unless it is built when it is needed: a server that answers some
    shapes alone cannot say which. Raises ArchUnavailable when the compute capability has no kernels.
    """
    target = target_of(capability)
    families = sorted(
        ((number, arch) for arch, number in ARCHS.items() if target in ARCH_TARGETS[number]), reverse=True
    )
    return [_kernel_set(arch, _fault(number, target, artifacts), artifacts, device) for number, arch in families]


def _kernel_set(arch: Arch, fault: str, artifacts: Artifacts, device: Callable[[], str]) -> KernelSet:
    if fault or ARCHS[arch] not in UNPROVEN_ARCHS:
        return KernelSet(arch=arch, fault=fault)
    lack = lack_of_proof(artifacts.directory, arch, device)
    return KernelSet(arch=arch, fault=lack, is_unproven=bool(lack))


def _fault(number: int, target: str, artifacts: Artifacts) -> str:
    if artifacts.builds:
        return ""
    keys = _keys(number, target)
    with ThreadPoolExecutor(READERS) as pool:
        states = list(pool.map(partial(_state, artifacts), keys))
    missing = [key.name for key, state in zip(keys, states, strict=True) if state is ArtifactMissing]
    foreign = [key.name for key, state in zip(keys, states, strict=True) if state is ArtifactForeign]
    said = []
    if missing:
        said.append(f"{len(missing)} of its {len(keys)} kernels are not built")
    if foreign:
        said.append(f"{len(foreign)} of its {len(keys)} kernels are damaged or of another version ({foreign[0]})")
    if not said:
        return ""
    archs = ",".join(str(each) for each in sorted({number, statistics_arch(target)}))
    remedy = f"`dqkv kernels build --arch {archs} --target {target}` builds them"
    return f"{' and '.join(said)}: {remedy}" + (f" ({artifacts.lack})" if artifacts.lack else "")


def _state(artifacts: Artifacts, key: KernelKey) -> type[Exception] | None:
    """What is wrong with a kernel, None when nothing is."""
    try:
        artifacts.verify(key)
    except (ArtifactMissing, ArtifactForeign) as problem:
        return type(problem)
    return None


def _keys(number: int, target: str) -> list[KernelKey]:
    """The kernels of a family: its own, and those that recompute softmax_lse, which all families share."""
    shared = [key for key in default_set(statistics_arch(target), target) if key.kernel is Kernel.STATISTICS]
    return sorted({*default_set(number, target), *shared})
