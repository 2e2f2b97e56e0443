"""Kernels that are built when they are needed: each once, out of the way, and what cannot be built is said in words."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dqkv.errors import ArtifactForeign, ArtifactMissing, BuildFailed, KernelBuilding
from dqkv_kernels import artifacts, on_demand
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.build import Built, default_set, missing
from dqkv_kernels.key import Kernel, KernelKey
from dqkv_kernels.on_demand import OnDemandArtifacts

KEYS = [key for key in default_set(90, "sm_90a") if key.kernel is Kernel.POSTPROCESS]
PATIENCE_S = 60.0


class Builder:
    """Stands in for the compiler: it notes what it was asked, and writes files once it may."""

    def __init__(self, errors: dict[KernelKey, str] | None = None) -> None:
        self.asked: list[list[KernelKey]] = []
        self.errors = errors or {}
        self.may = threading.Event()

    def __call__(self, keys: Sequence[KernelKey], directory: Path) -> Sequence[Built]:
        self.asked.append(list(keys))
        assert self.may.wait(PATIENCE_S)
        outcomes = [Built(key=key, seconds=1.0, error=self.errors.get(key, "")) for key in keys]
        for built in outcomes:
            if not built.error:
                (directory / f"{built.key.name}.so").write_text(built.key.name)
        return outcomes


@pytest.fixture(autouse=True)
def files_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with the name of a key in it is its kernel: the gates test what is whole and how it is loaded."""

    def verify(self: Artifacts, key: KernelKey) -> dict[str, str]:
        path = self.directory / f"{key.name}.so"
        if not path.exists():
            raise ArtifactMissing(f"{key.name} is missing")
        if path.read_text() != key.name:
            raise ArtifactForeign(f"{key.name} is damaged")
        return {}

    monkeypatch.setattr(Artifacts, "verify", verify)
    monkeypatch.setattr(artifacts, "_open", lambda path: lambda: path)


def wait_until(is_so) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def loads(kernels: OnDemandArtifacts, *keys: KernelKey) -> bool:
    try:
        kernels.load_all(dict(enumerate(keys)))
    except KernelBuilding:
        return False
    return True


def test_what_is_missing_is_built_together_while_the_caller_is_told_to_come_back(tmp_path):
    builder = Builder()
    kernels = OnDemandArtifacts(tmp_path, builder)
    with pytest.raises(KernelBuilding, match=f"2 of them .{KEYS[0].name}, {KEYS[1].name}") as caught:
        kernels.load_all({"a": KEYS[0], "b": KEYS[1]})
    assert caught.value.status.retryable
    assert caught.value.retry_after_s > 0
    builder.may.set()
    wait_until(lambda: loads(kernels, KEYS[0], KEYS[1]))
    assert builder.asked == [[KEYS[0], KEYS[1]]]
    assert kernels.load_all({"a": KEYS[0]})["a"]() == tmp_path / f"{KEYS[0].name}.so"


def test_a_key_is_built_once_however_many_ask_for_it(tmp_path):
    builder = Builder()
    kernels = OnDemandArtifacts(tmp_path, builder)
    askers = [threading.Thread(target=loads, args=(kernels, KEYS[0], KEYS[1 + i % 2])) for i in range(16)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(PATIENCE_S)
    builder.may.set()
    wait_until(lambda: loads(kernels, *KEYS[:3]))
    assert sorted(key for keys in builder.asked for key in keys) == sorted(KEYS[:3])


def test_no_more_threads_build_than_may(tmp_path):
    builder = Builder()
    kernels = OnDemandArtifacts(tmp_path, builder)
    before = threading.active_count()
    for key in KEYS:
        assert not loads(kernels, key)
    assert threading.active_count() <= before + on_demand.BUILDS_AT_ONCE
    builder.may.set()
    wait_until(lambda: loads(kernels, *KEYS))


def test_what_is_damaged_is_built_anew(tmp_path):
    (tmp_path / f"{KEYS[0].name}.so").write_text("another")
    builder = Builder()
    builder.may.set()
    kernels = OnDemandArtifacts(tmp_path, builder)
    wait_until(lambda: loads(kernels, KEYS[0]))
    assert builder.asked == [[KEYS[0]]]


def test_a_failure_is_remembered_in_words_and_harms_no_other(tmp_path):
    builder = Builder({KEYS[0]: "RegisterError: too many"})
    builder.may.set()
    kernels = OnDemandArtifacts(tmp_path, builder)
    assert not loads(kernels, KEYS[0], KEYS[1])
    wait_until(lambda: loads(kernels, KEYS[1]))
    for _ in range(3):
        with pytest.raises(BuildFailed, match=f"{KEYS[0].name} cannot be built: RegisterError: too many"):
            kernels.load_all({"a": KEYS[0], "b": KEYS[1]})
    assert len(builder.asked) == 1


def test_a_builder_that_breaks_is_a_failure_too(tmp_path):
    def breaks(keys: Sequence[KernelKey], directory: Path) -> Sequence[Built]:
        raise RuntimeError("no pipes")

    kernels = OnDemandArtifacts(tmp_path, breaks)

    words = []

    def has_failed() -> bool:
        try:
            return loads(kernels, KEYS[0])
        except BuildFailed as failure:
            words.append(failure.message)
            return True

    wait_until(has_failed)
    assert "the builder failed: RuntimeError: no pipes" in words[0]


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")  # the process ends it
def test_a_directory_that_cannot_be_written_is_replaced_and_that_is_said_once(tmp_path, caplog):
    (tmp_path / "file").touch()
    builder = Builder()
    builder.may.set()
    kernels = OnDemandArtifacts(tmp_path / "file" / "kernels", builder)
    with caplog.at_level(logging.WARNING):
        wait_until(lambda: loads(kernels, KEYS[0]))
        wait_until(lambda: loads(kernels, KEYS[1]))
    said = [record.message for record in caplog.records if "cannot be kept" in record.message]
    assert len(said) == 1
    assert str(tmp_path / "file" / "kernels") in said[0]


def test_kernels_that_are_there_need_no_builder(tmp_path):
    builder = Builder()
    (tmp_path / f"{KEYS[0].name}.so").write_text(KEYS[0].name)
    assert loads(OnDemandArtifacts(tmp_path, builder), KEYS[0])
    assert builder.asked == []


@pytest.mark.parametrize("there", [True, False])
def test_it_says_whether_it_can_build(tmp_path, monkeypatch, there):
    monkeypatch.setattr(on_demand, "find_spec", lambda name: object() if there else None)
    kernels = OnDemandArtifacts(tmp_path)
    assert kernels.builds == there
    assert kernels.lack == ("" if there else "the compiler, nvidia-cutlass-dsl, is not installed")
    assert (Artifacts(tmp_path).builds, Artifacts(tmp_path).lack) == (False, "")


# ---- with the compiler
PROCESSES = 8


@pytest.mark.timeout(300)
def test_processes_that_need_the_same_kernel_build_it_once(tmp_path, monkeypatch):
    pytest.importorskip("cutlass", reason="the compile extra is not installed")
    monkeypatch.undo()
    request = json.dumps(KEYS[0].as_dict()) + "\n"
    command = [sys.executable, "-P", "-m", "dqkv_kernels.build", str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(PROCESSES)]
    for process in processes:
        process.stdin.write(request)
        process.stdin.close()
    answers = [json.loads(process.stdout.read().splitlines()[-1]) for process in processes]
    for process in processes:
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 0
    assert [answer["error"] for answer in answers] == [""] * PROCESSES
    assert sum(answer["seconds"] > 0 for answer in answers) == 1
    assert missing([KEYS[0]], tmp_path) == ()
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {
        f"{KEYS[0].name}{suffix}" for suffix in (".so", ".json", ".ptx")
    }


@pytest.mark.timeout(300)
def test_a_kernel_is_built_and_loaded_while_its_caller_comes_back(tmp_path, monkeypatch):
    pytest.importorskip("cutlass", reason="the compile extra is not installed")
    pytest.importorskip("tvm_ffi", reason="the compile extra is not installed")
    monkeypatch.undo()
    kernels = OnDemandArtifacts(tmp_path)
    wait_until(lambda: loads(kernels, KEYS[0]))
    assert Artifacts(tmp_path).verify(KEYS[0])["key"] == KEYS[0].as_dict()
    # another process, which builds nothing, takes what this one has kept
    assert callable(Artifacts(tmp_path).load(KEYS[0]))
