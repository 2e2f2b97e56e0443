"""Every gated kernel compiles for its target, and the assembler finds no spill, no stack and nothing to warn of."""

from __future__ import annotations

import shutil

import pytest
from assembly import DIRECTORY, MAIN_LOOPS, WHOLE, assemble, gated_keys

from dqkv.errors import ArtifactForeign, ArtifactMissing
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.build import build, default_set, missing
from dqkv_kernels.key import Kernel
from dqkv_kernels.tiles import SHARED_MEMORY_LIMITS, rows_of

KEYS = gated_keys()
# The only spills that are known, in bytes a thread: addresses that dK and dV in fp32 are written to, once, at the end.
SPILLS = {
    (Kernel.MAIN_LOOP, "sm_80", 256, "fp32"): 160,
    (Kernel.MAIN_LOOP, "sm_86", 256, "fp32"): 288,
    (Kernel.MAIN_LOOP, "sm_120", 256, "fp32"): 288,
}
# Building takes minutes when nothing is kept; whichever test comes first pays for it.
pytestmark = pytest.mark.timeout(1500)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_kernel_compiles_and_its_artifact_is_whole(built, key):
    assert built[key].error == ""
    assert Artifacts(DIRECTORY).verify(key)["key"] == key.as_dict()


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_the_assembler_finds_nothing_to_complain_of(built, key):
    assert built[key].error == ""
    report = assemble(DIRECTORY / f"{key.name}.ptx", key.target)
    assert report.registers <= 255
    assert report.warnings == ()
    assert report.spill_bytes <= SPILLS.get((key.kernel, key.target, key.head_dim, key.grad_dtype), 0)
    assert report.stack_bytes <= report.spill_bytes


@pytest.mark.parametrize(("arch", "target"), [*WHOLE, *MAIN_LOOPS])
def test_a_tile_fits_the_shared_memory_of_its_target(arch, target):
    for tile in rows_of(arch, target):
        assert tile.shared_memory_bytes <= SHARED_MEMORY_LIMITS[target]


@pytest.mark.parametrize("key", [key for key in KEYS if key.kernel is Kernel.MAIN_LOOP], ids=lambda key: key.name)
def test_a_main_loop_multiplies_with_its_familys_instructions(built, key):
    assert built[key].error == ""
    ptx = (DIRECTORY / f"{key.name}.ptx").read_text()
    assert ("wgmma.mma_async" in ptx) == (key.arch == 90)
    assert ("mma.sync" in ptx) == (key.arch == 80)
    assert ("tcgen05.mma" in ptx) == (key.arch == 100)
    assert ("cp.async.bulk.tensor" in ptx) == (key.arch == 100)
    assert ("cp.async.cg" in ptx) == (key.arch != 100)


def test_what_is_built_is_not_built_again(built):
    assert missing(KEYS, DIRECTORY) == ()
    assert {outcome.seconds for outcome in build(KEYS, DIRECTORY)} == {0.0}


@pytest.fixture
def one(built, tmp_path):
    """A key with its artifact alone in a directory of its own."""
    key = next(key for key in KEYS if key.kernel is Kernel.POSTPROCESS)
    for suffix in (".so", ".json"):
        shutil.copy(DIRECTORY / f"{key.name}{suffix}", tmp_path)
    return key, Artifacts(tmp_path)


def test_an_artifact_of_another_target_is_refused_with_both_named(one):
    key, artifacts = one
    other = next(k for k in default_set(80, "sm_80") if k.kernel is key.kernel and k.dtype != key.dtype)
    for suffix in (".so", ".json"):
        (artifacts.directory / f"{key.name}{suffix}").rename(artifacts.directory / f"{other.name}{suffix}")
    with pytest.raises(ArtifactForeign, match=f"{key.name}.*{other.name}"):
        artifacts.load(other)


def test_a_damaged_artifact_is_refused(one):
    key, artifacts = one
    path = artifacts.directory / f"{key.name}.so"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactForeign, match="damaged"):
        artifacts.load(key)


@pytest.mark.parametrize("field", ["source", "compiler"])
def test_an_artifact_of_other_source_or_compiler_is_refused(one, field):
    key, artifacts = one
    manifest = artifacts.directory / f"{key.name}.json"
    manifest.write_text(manifest.read_text().replace(f'"{field}": "', f'"{field}": "0'))
    with pytest.raises(ArtifactForeign, match=field):
        artifacts.load(key)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": {"kernel": "none"}}'])
def test_a_manifest_that_is_none_is_refused(one, text):
    key, artifacts = one
    (artifacts.directory / f"{key.name}.json").write_text(text)
    with pytest.raises(ArtifactForeign, match="not a kernel's manifest"):
        artifacts.load(key)


def test_a_missing_kernel_names_the_command_that_builds_it(one):
    key, artifacts = one
    (artifacts.directory / f"{key.name}.so").unlink()
    with pytest.raises(ArtifactMissing, match=f"dqkv kernels build .*--key {key.name}"):
        artifacts.load(key)


def test_a_kernel_that_does_not_compile_leaves_the_others_alone(tmp_path, built):
    key = next(key for key in KEYS if key.kernel is Kernel.POSTPROCESS)
    impossible = type(key)(**{**key.as_dict(), "kernel": key.kernel, "head_dim": 40, "head_dim_v": 40})
    outcomes = {outcome.key: outcome for outcome in build([impossible, key], tmp_path, processes=1)}
    assert "40" in outcomes[impossible].error
    assert outcomes[key].error == ""
    assert Artifacts(tmp_path).verify(key)
    assert not list(tmp_path.glob(f"{impossible.name}*"))
