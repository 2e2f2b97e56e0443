"""One engine, two images and one server for all tests of the image; a build from nothing takes minutes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from container import bookworm, pip_settings
from container.engine import Engine, NoEngine, find_engine
from container.image import ROOT, Builder, Image
from container.server import USER, Contained, contained
from dqkv_kernels.build import default_set
from dqkv_kernels.key import Kernel, KernelKey
from dqkv_kernels.tiles import ARCH_TARGETS

FOLDER = ROOT / "build" / "container"
"""Kept from run to run: the images, layer by layer, and their base."""
TIMEOUT_S = 1800
"""Of a test, since the first one that asks for an image builds it."""
KEYS = tuple(
    next(key for key in default_set(arch, target) if key.kernel is Kernel.POSTPROCESS)
    for arch, target in ((arch, targets[0]) for arch, targets in ARCH_TARGETS.items())
)
"""One small kernel of each family."""
SAID = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SAID] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[SAID]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def said(pytestconfig: pytest.Config) -> list[str]:
    """Lines that are printed when all tests are done."""
    return pytestconfig.stash[SAID]


@pytest.fixture(scope="session")
def engine(said: list[str]) -> Iterator[Engine]:
    try:
        found = find_engine(FOLDER)
    except NoEngine as error:
        pytest.fail(str(error), pytrace=False)
    said.append(f"images were built and run by {found.ask('--version').strip()}")
    yield found
    found.close()


@pytest.fixture
def docker(engine: Engine) -> Engine:
    """For what a service that watches its containers does, which podman leaves to systemd."""
    if not engine.is_docker:
        pytest.skip("no Docker engine answers here")
    return engine


@pytest.fixture(scope="session")
def builder(engine: Engine) -> Builder:
    folder = FOLDER / "settings"
    options = pip_settings.build_options(folder)
    base = "" if engine.is_docker else bookworm.make_base(engine, FOLDER)
    return Builder(engine=engine, folder=FOLDER, options=options, base=base)


@pytest.fixture(scope="session")
def image(builder: Builder, said: list[str]) -> Image:
    """The variant without CUDA."""
    built = builder.build("localhost/dqkv-test:cpu", {"VARIANT": "cpu"})
    said.append(f"VARIANT=cpu: {built.nbytes / 1e6:.0f} MB, built in {built.build_s:.0f} s")
    return built


@pytest.fixture(scope="session")
def keys() -> tuple[KernelKey, ...]:
    """What the image with kernels has."""
    return KEYS


@pytest.fixture(scope="session")
def gpu_image(builder: Builder, said: list[str]) -> Image:
    """The variant with kernels, one of each family, compiled by the build itself."""
    options = " ".join(f"--key {key.name}" for key in KEYS)
    built = builder.build("localhost/dqkv-test:gpu", {"VARIANT": "gpu", "KERNELS": options})
    said.append(f"VARIANT=gpu with {len(KEYS)} kernels: {built.nbytes / 1e6:.0f} MB, built in {built.build_s:.0f} s")
    return built


@pytest.fixture(scope="session")
def shared_folder() -> Iterator[Path]:
    """A folder of the host that a container's user may write to, and anybody may enter."""
    folder = Path(tempfile.mkdtemp(prefix="dqkv-regions-"))
    folder.chmod(0o755)
    os.chown(folder, USER, USER)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def server(image: Image, shared_folder: Path) -> Iterator[Contained]:
    """A server that shares memory with the host, for tests that leave it as it is."""
    options = ("--ipc", "host", "--volume", f"{shared_folder}:{shared_folder}")
    settings = {"region_socket": str(shared_folder / "regions"), "region_socket_mode": "666"}
    with contained(image, options=options, **settings) as one:
        yield one
