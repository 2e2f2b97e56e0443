"""`dqkv kernels`: what it builds, lists and verifies, and what it says of names that do not exist."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dqkv.__main__ import app
from dqkv_kernels.build import default_set
from dqkv_kernels.key import Kernel

KEY = next(key for key in default_set(90, "sm_90a") if key.kernel is Kernel.POSTPROCESS)


def kernels(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["kernels", *arguments], env={"COLUMNS": "400"})
    return result.exit_code, result.output


@pytest.mark.timeout(300)
def test_a_kernel_is_built_once_then_found_listed_and_verified(tmp_path):
    pytest.importorskip("cutlass", reason="the compile extra is not installed")
    code, text = kernels("build", "--out", str(tmp_path), "--key", KEY.name)
    assert code == 0
    assert "1 built, 0 were there, 0 failed" in text
    code, text = kernels("build", "--out", str(tmp_path), "--key", KEY.name)
    assert code == 0
    assert "0 built, 1 were there, 0 failed" in text
    code, text = kernels("list", "--out", str(tmp_path))
    assert code == 0
    assert f"{KEY.name}: built" in text
    assert text.count(": not built") == len(text.splitlines()) - 1
    assert kernels("verify", "--out", str(tmp_path))[0] == 0
    (tmp_path / f"{KEY.name}.so").write_bytes(b"nothing")
    code, text = kernels("verify", "--out", str(tmp_path))
    assert code == 1
    assert "damaged" in text


def test_a_family_is_not_tested_where_no_gpu_can_be(tmp_path):
    code, text = kernels("selftest", "--arch", "100", "--out", str(tmp_path))
    assert code == 1
    assert "sm100 is not tested: " in text
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_kernels_does_not_verify(tmp_path):
    code, text = kernels("verify", "--out", str(tmp_path))
    assert code == 1
    assert "0 of 0" in text


@pytest.mark.parametrize(
    ("option", "value"),
    [("--arch", "70"), ("--arch", "80,"), ("--target", "sm_90"), ("--key", "main_loop"), ("--set", "all")],
)
def test_what_does_not_exist_is_named(tmp_path, option, value):
    code, text = kernels("build", "--out", str(tmp_path), option, value)
    assert code == 1
    assert option in text
