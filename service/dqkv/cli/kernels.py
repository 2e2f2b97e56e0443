"""`dqkv kernels`: builds the kernels ahead of time, lists what is built, and verifies that it is whole and current."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dqkv import errors
from dqkv.errors import ArtifactForeign, ArtifactMissing
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.build import Built, build, default_set
from dqkv_kernels.key import KernelKey
from dqkv_kernels.tiles import ARCH_TARGETS


def run_build(archs: str, targets: str, names: Sequence[str], out: Path, processes: int) -> int:
    """Builds what is missing of the chosen kernels into `out`; 0 when all of them are there afterwards, else 1.

    archs and targets are comma-separated; names, where given, choose kernels of any arch and target instead.
    """
    console = Console()
    try:
        keys = _named(names) if names else _chosen(archs, targets)
    except errors.DqkvError as error:
        console.print(error.message, style="bold red", markup=False)
        return 1
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed: list[Built] = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("building kernels", total=len(keys))

        def advance(built: Built) -> None:
            progress.advance(task)
            if built.error:
                failed.append(built)
                progress.console.print(f"{built.key.name}: {built.error}", style="bold red", markup=False)

        outcomes = build(keys, out, processes=processes, progress=advance)
    fresh = sum(1 for built in outcomes if built.seconds and not built.error)
    console.print(f"{fresh} built, {len(outcomes) - fresh - len(failed)} were there, {len(failed)} failed, in {out}")
    return 1 if failed else 0


def run_list(out: Path) -> int:
    """Prints every kernel of the default sets and whether `out` has it; always 0."""
    console = Console()
    artifacts = Artifacts(out)
    for key in _chosen(",".join(map(str, ARCH_TARGETS)), ",".join(_targets())):
        console.print(f"{key.name}: {_state(artifacts, key)}", markup=False, highlight=False)
    return 0


def run_verify(out: Path) -> int:
    """Checks every kernel in `out`; 0 when all are whole and of this source, 1 when one is not or none is there."""
    console = Console()
    artifacts = Artifacts(out)
    keys = [key for key in _chosen(",".join(map(str, ARCH_TARGETS)), ",".join(_targets())) if key in artifacts]
    wrong = 0
    for key in keys:
        try:
            artifacts.verify(key)
        except (ArtifactForeign, ArtifactMissing) as problem:
            wrong += 1
            console.print(problem.message, style="bold red", markup=False)
    console.print(f"{len(keys) - wrong} of {len(keys)} kernels in {out} are whole and of this source")
    return 1 if wrong or not keys else 0


def _targets() -> list[str]:
    return sorted({target for targets in ARCH_TARGETS.values() for target in targets})


def _chosen(archs: str, targets: str) -> list[KernelKey]:
    """The default sets of every pair that is made. Raises OptionInvalid for an arch or target that is in none."""
    wanted_archs, wanted_targets = archs.split(","), targets.split(",")
    for name, wanted, known in (
        ("arch", wanted_archs, [str(arch) for arch in ARCH_TARGETS]),
        ("target", wanted_targets, _targets()),
    ):
        for value in wanted:
            if value not in known:
                raise errors.OptionInvalid(f"--{name} has {value!r}, must be of {', '.join(known)}", field=name)
    pairs = [(int(arch), target) for arch, target in product(wanted_archs, wanted_targets)]
    return [key for arch, target in pairs if target in ARCH_TARGETS[arch] for key in default_set(arch, target)]


def _named(names: Sequence[str]) -> list[KernelKey]:
    """The kernels of these names. Raises OptionInvalid for a name that no kernel has."""
    known = {key.name: key for key in _chosen(",".join(map(str, ARCH_TARGETS)), ",".join(_targets()))}
    for name in names:
        if name not in known:
            raise errors.OptionInvalid(f"--key {name!r} is no kernel: `dqkv kernels list` names them", field="key")
    return [known[name] for name in names]


def _state(artifacts: Artifacts, key: KernelKey) -> str:
    try:
        artifacts.verify(key)
    except ArtifactMissing:
        return "not built"
    except ArtifactForeign as problem:
        return problem.message
    return "built"
