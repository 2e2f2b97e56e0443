"""GPUs as the probe finds them, which of them are used, and what is said of the others; the driver is told."""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from dqkv import errors
from dqkv.backend import findings, kernel_sets, probe, proof
from dqkv.backend.findings import Choice, Findings, Gpu, choose, look
from dqkv.problem import Arch
from dqkv.settings import Settings
from dqkv_kernels import on_demand
from dqkv_kernels.artifacts import COMPILER_VERSION, Artifacts, source_digest

H200 = Gpu(index=0, model="NVIDIA H200", archs=(Arch.SM90, Arch.SM80))
HALF = Gpu(index=1, model="NVIDIA H200", archs=(Arch.SM80,), faults=("sm90: 3 of its 72 kernels are not built",))
T4 = Gpu(index=2, model="Tesla T4", faults=("compute capability 7.5 has no kernels",))


UUID = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")


class ToldDriver:
    """What libcuda.so.1 would answer: CUresult numbers, and devices of one compute capability."""

    def __init__(self, *, init: int = 0, count: int = 0, capability: tuple[int, int] = (9, 0)) -> None:
        self.init, self.count, self.capability = init, count, capability

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        handle._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:
        name.value = b"NVIDIA Told"
        return 0

    def cuDeviceGetUuid(self, raw: Any, handle: Any) -> int:
        raw.raw = UUID.bytes
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:
        value._obj.value = self.capability[attribute - probe.MAJOR]
        return 0


def found(monkeypatch: pytest.MonkeyPatch, directory: Path, driver: ToldDriver, lack: str | None = "") -> Findings:
    monkeypatch.setattr(probe.ctypes, "CDLL", lambda name: driver)
    if lack is not None:
        monkeypatch.setattr(probe, "_lack", lambda: lack)
    return probe.find(directory)


def unasked() -> str:
    raise AssertionError("a family that has run before is used without its selftest")


def fill(directory: Path, arch: int, target: str) -> list[Path]:
    """Artifacts of every kernel of a family that are whole, as far as can be told without loading them."""
    paths = []
    for key in kernel_sets._keys(arch, target):
        path = directory / f"{key.name}.so"
        path.write_bytes(key.name.encode())
        manifest = {
            "key": key.as_dict(),
            "source": source_digest(),
            "compiler": COMPILER_VERSION,
            "object_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        path.with_suffix(".json").write_text(json.dumps(manifest))
        paths.append(path)
    return paths


# ---- the probe
@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (ToldDriver(), "the NVIDIA driver shows no device"),
        (ToldDriver(init=probe.CUDA_NO_DEVICE), "the NVIDIA driver shows no device"),
        (ToldDriver(init=999), "the NVIDIA driver does not start (CUDA error 999)"),
    ],
)
def test_a_driver_without_a_device_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: ToldDriver, words: str
) -> None:
    assert found(monkeypatch, tmp_path, driver) == Findings(absence=words)


def test_an_installation_that_cannot_use_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lack = "PyTorch 2.11.0 is built without CUDA"
    seen = found(monkeypatch, tmp_path, ToldDriver(count=2), lack)
    assert seen.gpus == tuple(Gpu(index=index, model="NVIDIA Told", faults=(lack,)) for index in range(2))


def test_what_is_lacking_here_is_read_without_torch_being_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    (gpu,) = found(monkeypatch, tmp_path, ToldDriver(count=1), None).gpus
    if torch.version.cuda is None:
        assert gpu.faults == (f"PyTorch {torch.__version__} is built without CUDA",)


def test_a_gpu_without_kernels_in_this_version_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (gpu,) = found(monkeypatch, tmp_path, ToldDriver(count=1, capability=(7, 5))).gpus
    assert gpu.archs == ()
    assert "compute capability 7.5 has no kernels" in gpu.faults[0]


def test_kernels_that_are_not_built_are_counted_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (gpu,) = found(monkeypatch, tmp_path, ToldDriver(count=1)).gpus
    assert gpu.archs == ()
    assert [fault.split(":")[0] for fault in gpu.faults] == ["sm90", "sm80"]
    assert "are not built: `dqkv kernels build --arch 80,90 --target sm_90a`" in gpu.faults[0]
    assert str(tmp_path) not in str(gpu), "callers read it"


def test_a_family_is_used_when_every_kernel_of_it_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = fill(tmp_path, 90, "sm_90a")
    (gpu,) = found(monkeypatch, tmp_path, ToldDriver(count=1)).gpus
    assert gpu.archs == (Arch.SM90,)
    assert len(gpu.faults) == 1
    paths[0].write_bytes(b"another")
    paths[1].unlink()
    sets = {each.arch: each.fault for each in kernel_sets.kernel_sets((9, 0), Artifacts(tmp_path), unasked)}
    assert f"1 of its {len(paths)} kernels are not built" in sets[Arch.SM90]
    assert f"1 of its {len(paths)} kernels are damaged or of another version ({paths[0].stem})" in sets[Arch.SM90]


@pytest.mark.parametrize(
    ("capability", "archs"), [((8, 0), [Arch.SM80]), ((8, 9), [Arch.SM80]), ((9, 0), [Arch.SM90, Arch.SM80])]
)
def test_each_device_has_its_families_best_first(
    tmp_path: Path, capability: tuple[int, int], archs: list[Arch]
) -> None:
    assert [each.arch for each in kernel_sets.kernel_sets(capability, Artifacts(tmp_path), unasked)] == archs


# ---- families that have to prove themselves
def seen_blackwell(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Gpu:
    (gpu,) = found(monkeypatch, directory, ToldDriver(count=1, capability=(10, 0))).gpus
    return gpu


def test_a_family_that_has_never_run_waits_for_its_selftest_on_each_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill(tmp_path, 100, "sm_100a")
    gpu = seen_blackwell(monkeypatch, tmp_path)
    assert (gpu.archs, gpu.unproven, gpu.uuid) == ((), (Arch.SM100,), str(UUID))
    assert "`dqkv kernels selftest --arch 100` has to pass on it first" in gpu.faults[0]
    choice = choose(Findings(gpus=(gpu,)), None)
    assert (choice.indices, len(choice.untested)) == ((), 1)
    assert choose(Findings(gpus=(gpu,)), ()).untested == ()

    proof.keep_proof(tmp_path, Arch.SM100, str(uuid.uuid4()), 3)
    assert seen_blackwell(monkeypatch, tmp_path).archs == ()  # another GPU's word
    proof.keep_proof(tmp_path, Arch.SM100, str(UUID), 3)
    gpu = seen_blackwell(monkeypatch, tmp_path)
    assert (gpu.archs, gpu.unproven, gpu.faults) == ((Arch.SM100,), (), ())
    assert choose(Findings(gpus=(gpu,)), None) == Choice(indices=(0,))

    proof.drop_proof(tmp_path, Arch.SM100, str(UUID))
    assert seen_blackwell(monkeypatch, tmp_path).archs == ()


@pytest.mark.parametrize("change", ["source", "device", "nothing that is JSON"])
def test_a_word_of_other_kernels_or_another_gpu_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    fill(tmp_path, 100, "sm_100a")
    path = proof.keep_proof(tmp_path, Arch.SM100, str(UUID), 3)
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, change: "0"}) if change in said else "{")
    gpu = seen_blackwell(monkeypatch, tmp_path)
    assert gpu.unproven == (Arch.SM100,)
    assert "again" in gpu.faults[0]


def test_kernels_that_are_missing_come_before_their_selftest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fill(tmp_path, 100, "sm_100a")[0].unlink()
    gpu = seen_blackwell(monkeypatch, tmp_path)
    assert (gpu.archs, gpu.unproven) == ((), ())
    assert "`dqkv kernels build --arch 100 --target sm_100a`" in gpu.faults[0]


def test_a_device_of_no_family_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(errors.ArchUnavailable, match=r"6\.1 has no kernels"):
        kernel_sets.kernel_sets((6, 1), Artifacts(tmp_path), unasked)


# ---- its process
def test_what_finds_gpus_never_loads_torch() -> None:
    program = "import sys, dqkv.backend.probe, dqkv.backend.kernel_sets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_kernels_that_are_built_when_needed_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for there, archs in ((True, (Arch.SM90, Arch.SM80)), (False, ())):
        monkeypatch.setattr(on_demand, "find_spec", lambda name, there=there: object() if there else None)
        monkeypatch.setattr(probe.ctypes, "CDLL", lambda name: ToldDriver(count=1))
        monkeypatch.setattr(probe, "_lack", lambda: "")
        (gpu,) = probe.find(tmp_path, builds=True).gpus
        assert gpu.archs == archs
        assert all("the compiler, nvidia-cutlass-dsl, is not installed" in fault for fault in gpu.faults)
        assert bool(gpu.faults) == (not there)


async def test_the_process_answers(tmp_path: Path) -> None:
    seen = await look(tmp_path)
    try:
        ctypes.CDLL(probe.DRIVER)
    except OSError:
        assert seen == Findings(absence="this machine has no NVIDIA driver (libcuda.so.1 cannot be loaded)")
    else:
        assert seen.gpus or seen.absence


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("sleep 60", "did not answer within 0.2 s"),
        ("echo nonsense", "failed with status 0"),
        ("kill -SEGV $$", "failed with status -11"),
        ("exit 3", "failed with status 3"),
    ],
)
async def test_a_process_that_fails_found_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, words: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/bash\nexec 2>/dev/null\n{'exec ' if 'sleep' in script else ''}{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(findings.sys, "executable", str(program))
    seen = await look(tmp_path, timeout_s=0.2 if "sleep" in script else 120)
    assert seen.gpus == ()
    assert words in seen.absence


async def test_a_process_that_cannot_start_found_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(findings.sys, "executable", str(tmp_path / "nothing"))
    assert "could not be started" in (await look(tmp_path)).absence


# ---- the choice
@pytest.mark.parametrize(
    ("gpus", "indices", "notes"),
    [
        ("auto", (0, 1), ("GPU: cuda:1 (NVIDIA H200) computes without sm90: 3", "GPU: cuda:2 (Tesla T4) is not used")),
        ("0", (0,), ()),
        ("1,1,0", (1, 0), ("GPU: cuda:1 (NVIDIA H200) computes without",)),
        ("2", (), ("GPU: cuda:2 (Tesla T4) is not used: compute capability 7.5 has no kernels",)),
        ("0,7", (0,), ("GPU: DQKV_GPUS names 7, this machine has 0, 1, 2",)),
    ],
)
def test_the_settings_choose_among_those_found(gpus: str, indices: tuple[int, ...], notes: tuple[str, ...]) -> None:
    choice = choose(Findings(gpus=(H200, HALF, T4)), Settings.load(gpus=gpus).gpu_indices)
    assert choice.indices == indices
    assert len(choice.notes) == len(notes)
    for said, begin in zip(choice.notes, notes, strict=True):
        assert said.startswith(begin)


def test_none_found_is_said_once() -> None:
    assert choose(Findings(absence="no driver"), None) == Choice(notes=("GPU: no driver",))
