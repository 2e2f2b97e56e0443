"""What a server in a container may not do, and that it needs none of it."""

from __future__ import annotations

import pytest

from container.image import Image
from container.server import Contained, contained

STATUS = """
from pathlib import Path
for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
    fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    print(folder.name, *(fields[name].split()[0] for name in ("Name", "Uid", "Gid", "CapEff", "CapPrm", "NoNewPrivs")))
"""


def test_no_process_of_it_is_root_or_has_a_capability(server: Contained) -> None:
    rows = [row.split() for row in server.ask("python3", "-c", STATUS).splitlines()]
    assert rows[0][:2] == ["1", "tini"]
    # The init, the server, its device, and the program that asks.
    assert len(rows) >= 4
    for row in rows:
        assert row[2:] == ["10001", "10001", "0" * 16, "0" * 16, "1"]


@pytest.mark.parametrize("folder", ["/", "/opt/dqkv", "/opt/dqkv/build/kernels", "/etc", "/var/tmp", "/home"])
def test_it_cannot_write_to_its_root(server: Contained, folder: str) -> None:
    program = f"""
import errno, os
try:
    os.close(os.open("{folder}/written", os.O_CREAT | os.O_WRONLY))
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    assert server.ask("python3", "-c", program).strip() in {"EROFS", "EACCES"}
    mounts = server.ask("cat", "/proc/mounts").splitlines()
    (root,) = (row.split()[3].split(",") for row in mounts if row.split()[1] == "/")
    assert "ro" in root


def test_any_user_can_be_chosen(image: Image) -> None:
    with contained(image, options=("--user", "4711:0")) as server:
        rows = [row.split() for row in server.ask("python3", "-c", STATUS).splitlines()]
        assert {row[2] for row in rows} == {"4711"}
        assert "Every answer was right" in server.ask("dqkv", "check", server.target)


def test_it_is_not_open_to_others_unless_someone_says_so(image: Image) -> None:
    code, _, complaint = image.attempt()
    assert code == 1
    for name in ("DQKV_TLS_CERT", "DQKV_TLS_KEY", "DQKV_INSECURE_BIND"):
        assert name in complaint


@pytest.mark.parametrize("devices", [1, 0])
def test_as_it_comes_it_listens_everywhere_and_is_healthy_when_a_device_takes_work(image: Image, devices: int) -> None:
    """In a network of its own, at the ports that the image names."""
    with contained(image, network="none", insecure_bind="true", cpu_devices=str(devices)) as server:
        address = server.address
        assert {address["host"], address["http_host"]} == {"0.0.0.0"}
        assert (address["grpc_port"], address["stream_port"], address["http_port"]) == (50051, 50052, 8080)
        kind, *command = image.healthcheck
        assert kind == "CMD"
        healthy = image.engine.attempt("exec", server.name, *command)[0] == 0
        assert healthy == bool(devices)


def test_a_wrong_setting_is_told_in_words(image: Image) -> None:
    code, _, complaint = image.attempt("serve", options=("--env", "DQKV_PROT=1"))
    assert code == 1
    assert "DQKV_PROT is no setting; the nearest is DQKV_PORT" in complaint
