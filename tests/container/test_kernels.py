"""The image with kernels: they are whole, load without a compiler or a GPU, and can come ready made."""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path

from container.image import ROOT, Builder, Image
from container.server import contained
from dqkv_kernels.key import KernelKey
from dqkv_kernels.tiles import ARCH_TARGETS

KERNELS = "/opt/dqkv/build/kernels"
LOAD = """
import sys
from pathlib import Path
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.build import default_set
from dqkv_kernels.tiles import ARCH_TARGETS
keys = [key for arch, targets in ARCH_TARGETS.items() for key in default_set(arch, targets[0])]
artifacts = Artifacts(Path(sys.argv[1]))
found = [key for key in keys if key in artifacts]
assert all(callable(artifacts.load(key)) for key in found)
print(*(key.name for key in found))
"""
NOTE = """
import sys
from pathlib import Path
from dqkv.backend.proof import keep_proof
from dqkv.problem import Arch
keep_proof(Path(sys.argv[1]), Arch.SM100, "a gpu", 1)
"""
NOTED = """
import sys
from pathlib import Path
from dqkv.backend.proof import lack_of_proof
from dqkv.problem import Arch
print(repr(lack_of_proof(Path(sys.argv[1]), Arch.SM100, lambda: "a gpu")))
"""


def copied(image: Image, folder: Path) -> Path:
    """The image's kernels on this host."""
    container = image.engine.ask("create", image.tag).strip()
    try:
        image.engine.ask("cp", f"{container}:{KERNELS}", str(folder / "kernels"))
    finally:
        image.engine.ask("rm", container)
    return folder / "kernels"


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


def test_unless_told_otherwise_the_build_makes_every_family_of_kernels() -> None:
    (said,) = re.findall(r'^ARG KERNELS="--arch (\S+) --target (\S+)"$', (ROOT / "Dockerfile").read_text(), re.M)
    archs, targets = (part.split(",") for part in said)
    assert {int(arch) for arch in archs} == ARCH_TARGETS.keys()
    assert all(set(targets) & set(made) for made in ARCH_TARGETS.values())


def test_the_kernels_that_the_build_compiled_are_whole_and_of_its_source(
    gpu_image: Image, keys: tuple[KernelKey, ...]
) -> None:
    assert f"{len(keys)} of {len(keys)} kernels in build/kernels are whole" in gpu_image.run("kernels", "verify")
    names = {f"{key.name}{suffix}" for key in keys for suffix in (".so", ".json")}
    assert set(gpu_image.run("-A", KERNELS, entrypoint="ls").split()) == names | {"libcute_dsl_runtime.so", "selftests"}


def test_they_load_where_there_is_neither_a_compiler_nor_a_gpu(gpu_image: Image, keys: tuple[KernelKey, ...]) -> None:
    loaded = gpu_image.run("-c", LOAD, KERNELS, entrypoint="python3").split()
    assert sorted(loaded) == sorted(key.name for key in keys)


def test_a_damaged_kernel_does_not_verify(gpu_image: Image, keys: tuple[KernelKey, ...]) -> None:
    program = (
        f"cp -r {KERNELS} /tmp/kernels; echo >> /tmp/kernels/{keys[0].name}.so; dqkv kernels verify --out /tmp/kernels"
    )
    code, said, _ = gpu_image.attempt("-c", program, entrypoint="sh")
    assert code == 1
    assert "damaged" in said
    assert f"{len(keys) - 1} of {len(keys)}" in said


def test_the_image_without_kernels_has_none(image: Image) -> None:
    code, said, _ = image.attempt("kernels", "verify")
    assert (code, "0 of 0 kernels" in said) == (1, True)


def test_what_a_selftest_notes_of_a_gpu_stays_in_a_volume(gpu_image: Image) -> None:
    volume = f"dqkv-test-{secrets.token_hex(4)}"
    options = ("--volume", f"{volume}:{KERNELS}/selftests")
    try:
        gpu_image.run("-c", NOTE, KERNELS, entrypoint="python3", options=options)
        assert gpu_image.run("-c", NOTED, KERNELS, entrypoint="python3", options=options) == "''\n"
        assert "has to pass on it first" in gpu_image.run("-c", NOTED, KERNELS, entrypoint="python3")
    finally:
        gpu_image.engine.ask("volume", "rm", "--force", volume)


def test_its_server_serves_where_there_is_no_gpu_and_says_so(gpu_image: Image) -> None:
    with contained(gpu_image, gpus="auto") as server:
        code, body = server.http("/v1/info")
        assert code == 200
        assert b"libcuda.so.1" in body
        assert "Every answer was right" in server.ask("dqkv", "check", server.target)


def test_kernels_that_were_built_before_are_taken_as_they_are(
    builder: Builder, gpu_image: Image, keys: tuple[KernelKey, ...], tmp_path: Path
) -> None:
    ready = copied(gpu_image, tmp_path)
    wanted = digests(ready)
    (ready / "libcute_dsl_runtime.so").unlink()
    arguments = {"VARIANT": "gpu", "ARTIFACTS": "build/kernels"}
    image = builder.build("localhost/dqkv-test:ready", arguments, artifacts=ready)
    assert f"{len(keys)} of {len(keys)} kernels in build/kernels are whole" in image.run("kernels", "verify")
    (tmp_path / "found").mkdir()
    assert digests(copied(image, tmp_path / "found")) == wanted
