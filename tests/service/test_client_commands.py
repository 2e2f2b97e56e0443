"""The commands as an operator types them: demo, check, bench, serve, settings; their words and exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rig.memory import segment_names
from rig.process import wait_for
from rig.server import Running, running
from typer.testing import CliRunner

from dqkv.__main__ import SERVER_MODULES, app
from dqkv.check import Outcome, check, judge
from dqkv.cli.bench import SIZES
from dqkv.courier import Answer, Courier, Door, Transport
from dqkv.problem import Gradients, Report
from dqkv.tensor import NUMPY_DTYPES
from dqkv.trials import TRIALS, Drawn, Trial, draw

REPORT = Report(arch="cpu", kernel="", device="")


def dqkv(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dqkv", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "COLUMNS": "140", **environment},
    )


def test_demo_is_within_budget_by_every_transport_and_leaves_nothing() -> None:
    before = segment_names()
    done = dqkv("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("dense", "packed", "shared", "unary", "stream", "region", "cpu:0", "GPU", "round trip"):
        assert words in done.stdout
    assert "wrong" not in done.stdout
    wait_for(lambda: segment_names() <= before, "no memory is left; others of this machine come and go")


def test_demo_says_why_a_server_did_not_start() -> None:
    done = dqkv("demo", DQKV_NO_SUCH_SETTING="1")
    assert done.returncode == 1
    assert "DQKV_NO_SUCH_SETTING is no setting" in done.stdout


def test_check_finds_a_right_server_right(server: Running) -> None:
    done = dqkv("check", server.target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{3 * len(TRIALS)} right" in done.stdout
    assert "wrong" not in done.stdout


def test_check_of_nobody_fails() -> None:
    done = dqkv("check", "127.0.0.1:1")
    assert done.returncode == 1
    assert "TRANSPORT" in done.stdout


def test_check_with_a_token_file(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    with running(tokens="op:gradient:s3cret") as server:
        assert dqkv("check", server.target).returncode == 1
        with Courier(Door(address=server.target, token=secret.read_text().strip())) as courier:
            assert {verdict.outcome for verdict in check(courier, TRIALS[:1])} == {Outcome.RIGHT}


def test_bench_prints_a_row_a_transport(server: Running) -> None:
    done = dqkv("bench", server.target, "--seconds", "0.2")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("1x16x1x64", "unary", "stream", "region", "GFLOP/s"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bench", "a:1", "--dtype", "fp64"), "must be bf16, fp16 or fp32"),
        (("check", "a:1", "--certificate", "cert.pem"), "needs its key"),
        (("check", "a:1", "--token-file", "no-such-file"), "No such file"),
        (("serve", "--set", "port"), "is not NAME=VALUE"),
        (("check", "127.0.0.1"), "port of 1 to 65535"),
        (("bench", "http://127.0.0.1:1"), "port of 1 to 65535"),
    ],
)
def test_a_wrong_option_is_said_in_words(arguments: tuple[str, ...], says: str) -> None:
    done = dqkv(*arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_serve_refuses_an_unknown_setting() -> None:
    for arguments in (("--set", "prt=1"), ("--set", "port=many")):
        done = dqkv("serve", *arguments)
        assert done.returncode == 1
        assert "cannot start" in done.stderr
    done = dqkv("serve", DQKV_PROT="1")
    assert done.returncode == 1
    assert "DQKV_PORT" in done.stderr


def test_settings_are_listed() -> None:
    done = dqkv("settings")
    assert done.returncode == 0
    assert "DQKV_STREAM_IDLE_S" in done.stdout


def test_the_version_is_the_installed_one() -> None:
    done = dqkv("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dqkv {metadata.version('dqkv')}\n", "")


def test_bench_shows_every_name_whole_on_80_columns(server: Running) -> None:
    done = dqkv("bench", server.target, "--seconds", "0.1", COLUMNS="80")
    assert done.returncode == 0, done.stdout + done.stderr
    timed = [str(size) for size in SIZES if f"{size} was left out" not in done.stdout]
    assert timed
    for size in timed:
        for transport in Transport:
            assert re.search(rf"^ *{size} +{transport} ", done.stdout, re.MULTILINE), done.stdout
    assert "…" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


# ---- without an extra
WITHOUT = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.parametrize("command", ["serve", "demo", "settings"])
@pytest.mark.parametrize("hidden", SERVER_MODULES)
def test_a_command_without_the_servers_extra_says_one_line(
    command: str, hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == hidden else real(name))
    done = CliRunner().invoke(app, [command])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"dqkv {command} needs pip install 'dqkv[server]'\n"


def test_the_servers_extra_is_what_the_package_says_it_is() -> None:
    wanted = {
        re.split(r"[^A-Za-z0-9_-]", line)[0].lower()
        for line in metadata.requires("dqkv") or []
        if re.search(r"extra == ['\"]server['\"]", line)
    }
    brought_by = metadata.packages_distributions()
    assert wanted == {brought_by[module][0].lower().replace("_", "-") for module in SERVER_MODULES}


def test_attention_without_torch_says_one_line() -> None:
    program = WITHOUT.format(hidden={"torch"}) + "import dqkv\ndqkv.Client\ndqkv.attention\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    says = "ModuleNotFoundError: dqkv.attention needs torch: pip install 'dqkv[client-torch]'"
    assert done.stderr.splitlines()[-1] == says
    assert "During handling" not in done.stderr


# ---- what check calls wrong
def answer_of(drawn: Drawn, change: Callable[[dict[str, Any]], None]) -> Answer:
    """The exact answer in the dtype asked for, changed."""
    specs = drawn.problem.gradients
    roles = {role: array.astype(NUMPY_DTYPES[specs[role].dtype]) for role, array in drawn.expected.gradients.items()}
    change(roles)
    return Answer(gradients=Gradients(**{"dsink": None, **roles}, report=REPORT), round_trip_s=0.0)


BLIND = Trial(name="blind", shows="", seqlen_q=24, seqlen_k=8, sink=True, options=TRIALS[1].options)


def scale(role: str, factor: float) -> Callable[[dict[str, Any]], None]:
    def change(roles: dict[str, Any]) -> None:
        roles[role] = (roles[role].astype(np.float32) * factor).astype(roles[role].dtype)

    return change


def set_one(role: str, index: tuple[int, ...], value: float) -> Callable[[dict[str, Any]], None]:
    def change(roles: dict[str, Any]) -> None:
        roles[role][index] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (scale("dq", 1.1), "dq has"),
        (scale("dk", -1.0), "dk has"),
        (scale("dv", 0.9), "dv has"),
        (scale("dsink", 1.2), "dsink has"),
        (set_one("dv", (0, 3, 1, 5), float("nan")), "dv is not finite"),
        (set_one("dq", (1, 20, 0, 0), float("inf")), "dq is not finite"),
        (set_one("dq", (0, 2, 0, 0), 1e-6), "dq has values in rows that nothing flows into"),
    ],
)
def test_a_wrong_answer_is_called_wrong(change: Callable[[dict[str, Any]], None], says: str) -> None:
    drawn = draw(BLIND)
    right = judge(BLIND, drawn, Transport.UNARY, answer_of(drawn, lambda roles: None))
    assert (right.outcome, right.says) == (Outcome.RIGHT, "")
    wrong = judge(BLIND, drawn, Transport.UNARY, answer_of(drawn, change))
    assert wrong.is_bad
    assert says in wrong.says


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_each_trial_tells_right_from_slightly_wrong(trial: Trial) -> None:
    drawn = draw(trial)
    assert not judge(trial, drawn, Transport.UNARY, answer_of(drawn, lambda roles: None)).is_bad
    for role in drawn.expected.gradients:
        assert judge(trial, drawn, Transport.UNARY, answer_of(drawn, scale(role, 1.15))).is_bad, role
