"""Runs the tests that need numpy alone on other interpreters: `python tests/interpreters.py 3.12 3.13`.

Each interpreter that is installed gets a small environment under `.venvs/` with the base dependencies, at the
versions of `constraints.txt`, and no torch. Then the test modules marked `numpy_only` run there.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")


def main(versions: list[str]) -> int:
    """Runs the tests on each version that is installed; the exit status is 0 when none of them failed."""
    modules = marked_modules()
    if not modules:
        print("no test module is marked numpy_only")
        return 1
    failed = []
    for version in versions:
        interpreter = find_interpreter(version)
        if interpreter is None:
            print(f"Python {version} is not installed here: its tests are not run", flush=True)
            continue
        python = environment(version, interpreter)
        print(f"Python {version}, numpy alone: {len(modules)} test modules", flush=True)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "numpy_only", *modules]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(version)
    for version in failed:
        print(f"the tests failed on Python {version}")
    return 1 if failed else 0


def marked_modules() -> list[str]:
    """The test modules that name the marker; others may import torch and are not even collected."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "mark.numpy_only" in path.read_text()]


def find_interpreter(version: str) -> Path | None:
    """An interpreter of this version on the search path or under pyenv; None when none starts."""
    candidates = []
    if found := shutil.which(f"python{version}"):
        candidates.append(Path(found))
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=True).stdout.strip()
        candidates.extend(sorted(Path(root, "versions").glob(f"{version}.*/bin/python{version}")))
    return next((path for path in candidates if _starts(path, version)), None)


def environment(version: str, interpreter: Path) -> Path:
    """The Python of this version's environment, made anew when the project's dependencies have changed."""
    folder = ROOT / ".venvs" / version
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    facts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    digest = hashlib.sha256(b"".join([*facts, str(interpreter).encode(), *map(str.encode, REQUIREMENTS)])).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return python
    subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "-c", "constraints.txt"]
    subprocess.run([*pip, "hatchling", "editables"], cwd=ROOT, check=True)
    subprocess.run([*pip, "--no-build-isolation", "-e", ".", *REQUIREMENTS], cwd=ROOT, check=True)
    stamp.write_text(digest)
    return python


def _starts(path: Path, version: str) -> bool:
    # A shim on the search path may be there for a version that is not chosen: it exits with an error.
    command = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode == 0 and result.stdout.strip() == version


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
