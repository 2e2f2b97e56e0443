"""Builds listed kernels ahead of time, several processes at once, and says which artifacts are there and whole."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import monotonic

from dqkv import errors
from dqkv.errors import ArtifactForeign, ArtifactMissing, BuildFailed
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.key import Kernel, KernelKey
from dqkv_kernels.tiles import ARCH_TARGETS, rows_of, statistics_arch

INPUT_DTYPES = ("bf16", "fp16")
LOCKS = ".locks"
"""Folder of the directory of kernels with an empty file for each key that was built there."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """One key's outcome: seconds it took (0 when it was already there), and the error's text, "" when there is none."""

    key: KernelKey
    seconds: float
    error: str = ""


def default_set(arch: int, target: str) -> tuple[KernelKey, ...]:
    """Every kernel of an arch that some problem needs on a target. Raises ArchUnavailable for a pair not made."""
    if target not in ARCH_TARGETS.get(arch, ()):
        pairs = ", ".join(f"{a}: {'/'.join(targets)}" for a, targets in ARCH_TARGETS.items())
        raise errors.ArchUnavailable(f"arch {arch} for target {target} is not made, only {pairs}", field="arch")

    def key(kernel: Kernel, dtype: str, head_dim: int, **facts: object) -> KernelKey:
        return KernelKey(kernel=kernel, arch=arch, target=target, dtype=dtype, head_dim=head_dim, **facts)  # type: ignore[arg-type]

    widths = [(row.head_dim, row.head_dim_v) for row in rows_of(arch, target)]
    keys = []
    if arch == statistics_arch(target):
        for dtype, head_dim, softcap in product(INPUT_DTYPES, sorted({pair[0] for pair in widths}), (False, True)):
            keys.append(key(Kernel.STATISTICS, dtype, head_dim, softcap=softcap))
    for (head_dim, head_dim_v), dtype in product(widths, INPUT_DTYPES):
        keys.append(key(Kernel.PREPROCESS, dtype, head_dim, head_dim_v=head_dim_v))
        for softcap, grad_dtype in product((False, True), (dtype, "fp32")):
            keys.append(
                key(Kernel.MAIN_LOOP, dtype, head_dim, head_dim_v=head_dim_v, softcap=softcap, grad_dtype=grad_dtype)
            )
    for (head_dim, head_dim_v), dtype in product(widths, (*INPUT_DTYPES, "fp32")):
        keys.append(key(Kernel.POSTPROCESS, dtype, head_dim, head_dim_v=head_dim_v))
    return tuple(keys)


def missing(keys: Iterable[KernelKey], directory: Path) -> tuple[KernelKey, ...]:
    """The keys whose artifact is not there, not whole, or of other source."""

    def absent(key: KernelKey) -> bool:
        try:
            artifacts.verify(key)
        except (ArtifactMissing, ArtifactForeign):
            return True
        return False

    artifacts = Artifacts(directory)
    return tuple(key for key in keys if absent(key))


def build(
    keys: Sequence[KernelKey], directory: Path, processes: int = 2, progress: Callable[[Built], None] | None = None
) -> tuple[Built, ...]:
    """Builds what is missing of `keys` into `directory`, and reports every key as it is done; failures do not stop it.

    Each process compiles its share one key after the other. The compiler is imported there only, never here.
    """
    wanted = set(missing(keys, directory))
    done = [Built(key=key, seconds=0.0) for key in keys if key not in wanted]
    for built in done:
        if progress:
            progress(built)
    # neighbours take about equally long: dealt out in turn, the shares do too
    todo = [key for key in keys if key in wanted]
    shares = [todo[i::processes] for i in range(processes) if todo[i::processes]]

    def run(share: Sequence[KernelKey]) -> list[Built]:
        outcome = []
        for built in _compile(share, directory):
            outcome.append(built)
            if progress:
                progress(built)
        return outcome

    with ThreadPoolExecutor(max_workers=max(len(shares), 1)) as pool:
        for outcome in pool.map(run, shares):
            done += outcome
    return tuple(done)


def _compile(share: Sequence[KernelKey], directory: Path) -> Iterator[Built]:
    """Runs this module as a program over a share, and yields each key's outcome as its line arrives."""
    lines = "".join(json.dumps(key.as_dict()) + "\n" for key in share)
    # -P: what lies in the working directory is not imported.
    command = [sys.executable, "-P", "-m", "dqkv_kernels.build", str(directory)]
    with (
        tempfile.TemporaryFile() as said,  # a pipe that nobody reads would stop a compiler with much to say
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        if process.stdin is None or process.stdout is None:
            raise BuildFailed("the compiler's process has no pipes")
        # the requests are a few kilobytes, less than a pipe holds, so writing them first cannot block
        process.stdin.write(lines)
        process.stdin.close()
        left = list(share)
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            answer = json.loads(line)
            left.pop(0)
            yield Built(key=KernelKey.from_dict(answer["key"]), seconds=answer["seconds"], error=answer["error"])
        if left:
            process.wait()
            said.seek(0)
            tail = said.read()[-2000:].decode(errors="replace")
            for key in left:
                yield Built(key=key, seconds=0.0, error=f"the compiler's process ended early: {tail}")


def _serve(directory: Path) -> None:
    """Compiles the keys that come in, one JSON line each, and answers each with one; seconds 0: another one did."""
    for line in sys.stdin:
        key, seconds, error = KernelKey.from_dict(json.loads(line)), 0.0, ""
        try:
            with _alone(key, directory):
                if missing([key], directory):
                    start = monotonic()
                    # here, for who only waited for another process needs no compiler
                    from dqkv_kernels.compiler import compile_key

                    compile_key(key, directory)
                    seconds = monotonic() - start
        except Exception as problem:  # noqa: BLE001 - whatever the compiler raises is this key's outcome
            error = f"{type(problem).__name__}: {problem}"
        sys.stdout.write(json.dumps({"key": key.as_dict(), "seconds": seconds, "error": error}) + "\n")
        sys.stdout.flush()


@contextmanager
def _alone(key: KernelKey, directory: Path) -> Iterator[None]:
    """While no other process builds the key into the directory; a lock goes with the process that held it."""
    locks = directory / LOCKS
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / key.name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
