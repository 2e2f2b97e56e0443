"""What the project brings in is named exactly, and nothing that it is sent is ever executed."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.numpy_only

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = [path for root in ("service", "kernels") for path in sorted((ROOT / root).rglob("*.py"))]
SCRIPTS = [path for root in ("tests", "benchmarks") for path in sorted((ROOT / root).rglob("*.py"))]

UNPICKLERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
}
"""Modules that run what they read."""

LOADERS = {
    "torch.load", "torch.jit.load", "torch.package.PackageImporter", "numpy.load", "np.load", "yaml.load",
    "eval", "exec", "builtins.eval", "builtins.exec",
}  # fmt: skip
"""Calls that run what they read, or can be told to."""

BUILD_MACHINE = re.compile(r"""(?<![\w.$}*)-])/(?:work|root|home|Users)/[\w.]""")
"""A path that exists on the machine of whoever wrote the line."""


def requirements() -> dict[str, list[Requirement]]:
    """Every requirement that the project declares, by where it is declared."""
    project = PROJECT["project"]
    declared = {"build": PROJECT["build-system"]["requires"], "base": project["dependencies"]}
    declared |= project["optional-dependencies"]
    return {name: [Requirement(line) for line in lines] for name, lines in declared.items()}


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def violations(text: str) -> list[str]:
    """What a module's source imports or calls that would run bytes it reads."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            names = [ast.unparse(node.func)]
        else:
            continue
        found += [name for name in names if name.split(".")[0] in UNPICKLERS or name in LOADERS]
    return found


def test_every_constraint_is_one_exact_version():
    names = []
    for constraint in constraints():
        (specifier,) = constraint.specifier
        assert specifier.operator == "==", str(constraint)
        assert "*" not in specifier.version, str(constraint)
        names.append(canonicalize_name(constraint.name))
    assert len(names) == len(set(names))


@pytest.mark.parametrize("extra", requirements())
def test_every_requirement_is_pinned_within_its_range(extra):
    pinned = {canonicalize_name(constraint.name): constraint for constraint in constraints()}
    for requirement in requirements()[extra]:
        assert canonicalize_name(requirement.name) in pinned, str(requirement)
        (specifier,) = pinned[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(specifier.version), f"{requirement} is pinned at {specifier}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_unpickles_or_executes_what_it_reads(path):
    assert violations(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from torch import load",
        "def f():\n    from cloudpickle import loads",
        "import torch\ntorch.load('x')",
        "numpy.load('x', allow_pickle=True)",
        "exec(text)",
    ],
)
def test_the_search_finds_what_it_is_for(source):
    assert violations(source)


@pytest.mark.parametrize("path", SOURCES + SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_path_of_a_build_machine(path):
    assert BUILD_MACHINE.findall(path.read_text()) == []
