"""The image at rest: what it says of itself, what is in it, and what is not."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib

import pytest

from container.image import REVISION, ROOT, Image

LISTING = """
import json
from importlib.metadata import distributions
print(json.dumps({item.metadata["Name"]: item.version for item in distributions()}))
"""
DIGESTS = """
import hashlib
import json
import sysconfig
from pathlib import Path
here = Path(sysconfig.get_path("purelib"))
files = sorted(file for name in ("dqkv", "dqkv_kernels") for file in (here / name).rglob("*.py"))
print(json.dumps({str(file.relative_to(here)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}))
"""
# Names of programs and libraries that turn source into machine code.
COMPILERS = (
    r"(gcc|g\+\+|cc|c\+\+|clang|tcc|cc1|cc1plus|collect2|as|ld|gold|nvcc|ptxas|cicc|fatbinary|rustc|make|ninja)"
    r"|.*-linux-gnu-(gcc|g\+\+|as|ld).*|lib(nvvm|nvptxcompiler|cute_dsl_|cutlass).*"
)
SIZE_LIMIT_NBYTES = 1_300_000_000


def config(image: Image) -> dict[str, object]:
    return dict(image.engine.inspect(image.tag)["Config"])


def files(image: Image) -> list[str]:
    """Every file of the image's own file system, seen by root."""
    return image.run("/", "-xdev", "-type", "f", user="0", entrypoint="find").splitlines()


def test_it_says_which_version_of_which_source_it_is(image: Image) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = config(image)["Labels"]
    assert labels["org.opencontainers.image.version"] == project["version"]
    assert labels["org.opencontainers.image.revision"] == REVISION
    assert labels["dqkv.variant"] == "cpu"
    assert image.run("--version").strip() == f"dqkv {project['version']}"


def test_its_code_is_that_of_the_checkout(image: Image) -> None:
    """Also where the layers of an older build were there."""
    wanted = {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for root in (ROOT / "service", ROOT / "kernels")
        for file in root.rglob("*.py")
    }
    assert json.loads(image.python(DIGESTS)) == wanted


@pytest.mark.parametrize("variant", ["image", "gpu_image"])
def test_it_starts_the_server_as_a_numbered_user_that_is_not_root_below_an_init(
    variant: str, request: pytest.FixtureRequest
) -> None:
    image = request.getfixturevalue(variant)
    said = config(image)
    assert said["User"] == "10001:10001"
    assert said["Entrypoint"] + said["Cmd"] == ["tini", "--", "dqkv", "serve"]
    assert "DQKV_COMPILE=never" in said["Env"]
    # The variant without kernels looks for no GPU.
    assert ("DQKV_GPUS=none" in said["Env"]) == (variant == "image")
    assert image.run("-c", "id -u; id -g; id -un", entrypoint="sh").split() == ["10001", "10001", "dqkv"]


def test_every_package_in_it_is_of_the_version_that_is_tested(image: Image) -> None:
    rows = (row.split(";")[0].strip() for row in (ROOT / "constraints.txt").read_text().splitlines())
    pinned = dict(row.split("==") for row in rows if "==" in row)

    def canonical(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    tested = {canonical(name): version for name, version in pinned.items()}
    found = {canonical(name): version.split("+")[0] for name, version in json.loads(image.python(LISTING)).items()}
    assert found.pop("dqkv")
    assert len(found) > 30
    assert {name: version for name, version in found.items() if tested.get(name) != version} == {}


@pytest.mark.parametrize("variant", ["image", "gpu_image"])
def test_nothing_in_it_compiles_or_installs(variant: str, request: pytest.FixtureRequest) -> None:
    image = request.getfixturevalue(variant)
    found = {path for path in files(image) if re.fullmatch(COMPILERS, path.rpartition("/")[2])}
    # The runtime library of compiled kernels, which compiles nothing.
    assert found <= {"/opt/dqkv/build/kernels/libcute_dsl_runtime.so"}
    assert not {"pip", "triton", "nvidia-cutlass-dsl", "hatchling"} & json.loads(image.python(LISTING)).keys()


def test_nothing_of_the_builder_is_left_in_it(image: Image) -> None:
    code, listed, _ = image.attempt("-c", "find /run /build /wheels /etc/pip.conf -xdev", user="0", entrypoint="sh")
    assert code == 1
    left = {path for path in listed.splitlines() if "wheel" in path or "secret" in path or "pip" in path}
    assert left == set()
    history = image.engine.ask("history", "--no-trunc", image.tag)
    assert "pip.conf" in history
    for word in ("find-links", "index-url=", "cert ="):
        assert word not in history


def test_its_user_can_write_nowhere_but_to_places_for_temporary_files(image: Image) -> None:
    program = "find / -xdev -writable -not -type l -not -path '/proc/*' -not -path '/dev/*' 2>/dev/null || true"
    writable = image.engine.ask("run", "--rm", "--network", "none", "--entrypoint", "sh", image.tag, "-c", program)
    # The last is where a volume comes.
    places = {"/tmp", "/var/tmp", "/run/lock", "/var/lock", "/opt/dqkv/build/kernels/selftests"}
    assert set(writable.split()) <= places


def test_the_variant_without_cuda_is_small(image: Image, said: list[str]) -> None:
    folders = image.run("-c", "du -sm /usr /var /etc /opt/dqkv/lib/python3*/site-packages/*", user="0", entrypoint="sh")
    sizes = sorted(((int(row.split()[0]), row.split()[1]) for row in folders.splitlines()), reverse=True)
    said.extend(f"  {size:5} MB  {folder}" for size, folder in sizes[:8])
    assert image.nbytes < SIZE_LIMIT_NBYTES
    assert not [folder for _, folder in sizes if "/nvidia" in folder]
