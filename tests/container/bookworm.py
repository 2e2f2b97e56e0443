"""A base image made of Debian's packages, for hosts that reach Debian but no registry of images."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from container.engine import Engine

SUITE = "bookworm"
"""Its Python is 3.11."""
PACKAGES = ("ca-certificates", "python3", "python3-venv")
LEFT_OUT = ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale")
BOOTSTRAP_S = 600.0


def make_base(engine: Engine, folder: Path) -> str:
    """The tag of the base image; made anew only when what it is made of changed."""
    recipe = "\n".join((SUITE, *PACKAGES, *LEFT_OUT))
    tag = f"localhost/dqkv-test-base:{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not engine.has_image(tag):
        with tempfile.TemporaryDirectory(dir=folder, prefix="bookworm-") as scratch:
            root = Path(scratch) / "root"
            _bootstrap(root)
            for name in LEFT_OUT:
                shutil.rmtree(root / name, ignore_errors=True)
                (root / name).mkdir(parents=True)
            archive = Path(scratch) / "root.tar"
            subprocess.run(["tar", "--create", "--file", archive, "--directory", root, "."], check=True)
            engine.ask("import", str(archive), tag)
    return tag


def _bootstrap(root: Path) -> None:
    # It mounts /proc in there; in a mount namespace of its own nothing stays mounted, however it ends.
    command = ["unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE]
    done = subprocess.run([*command, root, *_mirror()], capture_output=True, text=True, timeout=BOOTSTRAP_S)
    if done.returncode:
        raise RuntimeError(f"debootstrap failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def _mirror() -> list[str]:
    """The mirror that this host's apt takes the suite from; none leaves the choice to debootstrap."""
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"]
    for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
        release, component, mirror = line.split(maxsplit=2)
        if (release, component) == (SUITE, "main"):
            return [mirror]
    return []
