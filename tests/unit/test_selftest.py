"""The selftest of a family of kernels: what it asks, what it finds wrong, what it keeps; the device is a stand-in."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from dqkv.backend import selftest
from dqkv.backend.findings import Findings, Gpu
from dqkv.backend.proof import keep_proof, lack_of_proof
from dqkv.cli import selftest as command
from dqkv.cli.selftest import Selftest, run_selftest, test_gpu
from dqkv.problem import Arch
from dqkv.trials import TRIALS
from dqkv_kernels import attention_backward
from dqkv_kernels.build import default_set
from dqkv_kernels.key import Kernel

test_gpu.__test__ = False  # type: ignore[attr-defined]
UUID = "00112233-4455-6677-8899-aabbccddeeff"
GPU = Gpu(index=0, model="Told B200", unproven=(Arch.SM100,), uuid=UUID)
WANTED = selftest.trials(Arch.SM100, "sm_100a")


class ToldChain:
    """Computes on the CPU what the kernels would on the device."""

    device = torch.device("cpu")

    def backward(self, problem: Any, tensors: Any, answers: Any) -> Any:
        assert problem.options.arch is Arch.SM100
        plain = replace(problem, options=replace(problem.options, arch=Arch.CPU))
        return attention_backward(plain, tensors, answers)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> selftest.Answer:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return selftest.on_device(ToldChain(), Arch.SM100)  # type: ignore[arg-type]


def test_every_main_loop_and_every_trial_of_its_dtypes_is_asked() -> None:
    names = [trial.name for trial in WANTED]
    assert len(set(names)) == len(names)
    assert {key.name for key in default_set(100, "sm_100a") if key.kernel is Kernel.MAIN_LOOP} <= set(names)
    assert {trial.name for trial in TRIALS if trial.name != "fp32"} <= set(names)


@pytest.mark.parametrize("trial", WANTED, ids=lambda trial: trial.name)
def test_right_answers_pass(answer: selftest.Answer, trial: Any) -> None:
    assert [outcome.wrong for outcome in selftest.outcomes((trial,), answer)] == [()]


@pytest.mark.parametrize("role", ["dq", "dk", "dv"])
def test_a_wrong_gradient_is_named(answer: selftest.Answer, role: str) -> None:
    def wrong(problem: Any) -> Mapping[str, Any]:
        given = dict(answer(problem))
        given[role] = given[role] * 1.25
        return given

    (outcome,) = selftest.outcomes(WANTED[:1], wrong)
    assert all(text.startswith(role) for text in outcome.wrong)
    assert outcome.wrong


def test_what_is_left_unwritten_or_differs_from_run_to_run_is_found(answer: selftest.Answer) -> None:
    deterministic = next(trial for trial in WANTED if trial.options.deterministic)
    runs = itertools.count()

    def unsteady(problem: Any) -> Mapping[str, Any]:
        given = {role: value.copy() for role, value in answer(problem).items()}
        given["dq"].reshape(-1)[0] += np.float32(next(runs) * 1e-7)
        return given

    (outcome,) = selftest.outcomes((deterministic,), unsteady)
    assert outcome.wrong == ("is deterministic, and differs from run to run",)

    def unwritten(problem: Any) -> Mapping[str, Any]:
        return {role: np.full_like(value, np.nan) for role, value in answer(problem).items()}

    (outcome,) = selftest.outcomes(WANTED[:1], unwritten)
    assert "dq is not finite" in outcome.wrong


def program(tmp_path: Path, body: str) -> tuple[str, ...]:
    """A stand-in for the process that tests a GPU."""
    path = tmp_path / "stand_in.py"
    names = [trial.name for trial in WANTED]
    path.write_text(
        f"import json, sys, time\nnames = {names!r}\nsay = lambda **o: print(json.dumps(o), flush=True)\n{body}"
    )
    return sys.executable, str(path)


def outcome_of(tmp_path: Path, body: str, timeout_s: float = 120.0) -> tuple[int, str, str]:
    """(exit code, what was printed, what keeps the family from being used)."""
    said = io.StringIO()
    test = Selftest(kernels=tmp_path, arch=Arch.SM100, timeout_s=timeout_s, command=program(tmp_path, body))
    code = test_gpu(test, GPU, Console(file=said, width=400))
    return code, said.getvalue(), lack_of_proof(tmp_path, Arch.SM100, lambda: UUID)


ALL_RIGHT = "for name in names: say(trial=name)"


def test_a_pass_is_kept(tmp_path: Path) -> None:
    code, said, lack = outcome_of(tmp_path, ALL_RIGHT)
    assert (code, lack) == (0, "")
    assert f"{len(WANTED)} of {len(WANTED)} trials passed" in said


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "for name in names: say(trial=name, wrong=['dq has 2 times the error'] if name == names[3] else [])",
            "dq has 2",
        ),
        ("for name in names[:-1]: say(trial=name)", f"{len(WANTED) - 1} of {len(WANTED)}"),
        (f"{ALL_RIGHT}\nsys.exit(3)", "status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "status -11"),
        ("print('nonsense')", f"0 of {len(WANTED)}"),
    ],
)
def test_a_failure_takes_an_earlier_pass_back(tmp_path: Path, body: str, words: str) -> None:
    keep_proof(tmp_path, Arch.SM100, UUID, len(WANTED))
    code, said, lack = outcome_of(tmp_path, body)
    assert code == 1
    assert words in said
    assert "has to pass on it first" in lack


def test_kernels_that_hang_are_ended(tmp_path: Path) -> None:
    code, said, lack = outcome_of(tmp_path, f"{ALL_RIGHT}\ntime.sleep(600)", timeout_s=3.0)
    assert code == 1
    assert "did not end within 3 s" in said
    assert lack


def test_an_outcome_that_cannot_be_kept_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "selftests").write_text("a file where a folder should be")
    code, said, _ = outcome_of(tmp_path, ALL_RIGHT)
    assert code == 1
    assert "cannot be kept" in said


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Findings(absence="this machine has no NVIDIA driver"), "no NVIDIA driver"),
        (Findings(gpus=(Gpu(index=0, model="H200", archs=(Arch.SM90,)),)), "no GPU runs this family"),
        (
            Findings(gpus=(Gpu(index=0, model="B200", faults=("sm100: 64 of its 64 kernels are not built",)),)),
            "not built",
        ),
    ],
)
def test_a_machine_without_a_gpu_to_test_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, found: Findings, words: str
) -> None:
    monkeypatch.setattr(command.probe, "find", lambda kernels: found)
    assert run_selftest(100, tmp_path, 1.0) == 1
    assert words in capsys.readouterr().out
    assert run_selftest(75, tmp_path, 1.0) == 1
