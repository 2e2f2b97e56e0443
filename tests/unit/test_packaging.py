"""What is installed: two packages from two source roots, and nothing that shadows another project's name."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.numpy_only

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for root in ("service", "kernels") for path in sorted((ROOT / root).rglob("*.py"))]


@pytest.mark.parametrize("root", ["service", "kernels", "proto"])
def test_source_roots_are_no_packages(root):
    assert (ROOT / root).is_dir()
    assert not (ROOT / root / "__init__.py").exists()


def test_wheel_holds_the_two_packages_alone(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"dqkv", "dqkv_kernels"}
    assert {"dqkv/py.typed", "dqkv_kernels/py.typed"} <= set(names)
    for source in SOURCES:
        assert source.relative_to(ROOT).as_posix().split("/", 1)[1] in names


def test_importing_the_client_brings_neither_torch_nor_the_server():
    code = (
        "import sys, dqkv; dqkv.Client; dqkv.AsyncClient; dqkv.Problem; dqkv.Gradients\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'pydantic', 'structlog', 'dqkv.server', 'dqkv.backend'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")


def test_generated_code_imports_without_a_warning():
    command = [sys.executable, "-W", "error", "-c", "import dqkv.v1.gradient_pb2_grpc"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_short_and_say_what_they_are(path):
    if path.is_relative_to(ROOT / "service/dqkv/v1"):
        pytest.skip("generated")
    text = path.read_text()
    limit = 900 if path.is_relative_to(ROOT / "kernels/dqkv_kernels/device") else 500
    assert len(text.splitlines()) <= limit
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":", "?"))
