"""Envoy with the configuration that is deployed, on this machine's addresses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from .fleet import Fleet
from .names import Names
from .process import wait_for
from .server import STOP_S

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"
PROGRAM = Path(sys.executable).with_name("envoy")
HOST = "127.0.0.1"


def configured(servers: Fleet, names: Names, name: str) -> dict[str, Any]:
    """What is deployed, but for addresses: where it listens, what the servers' name is, and who knows names."""
    found: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    ports = {"calls": servers.port, "streams": servers.stream_port}
    for listener in found["static_resources"]["listeners"]:
        listener["address"]["socket_address"] = _socket(HOST, ports[listener["name"]])
    for cluster in found["static_resources"]["clusters"]:
        (group,) = cluster["load_assignment"]["endpoints"]
        (item,) = group["lb_endpoints"]
        item["endpoint"]["address"]["socket_address"] = _socket(name, ports[cluster["name"]])
        if "health_check_config" in item["endpoint"]:
            item["endpoint"]["health_check_config"] = {"port_value": servers.port}
    found["admin"]["address"]["socket_address"] = _socket(HOST, 0)
    found["typed_dns_resolver_config"] = {
        "name": "envoy.network.dns_resolver.cares",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
            "resolvers": [{"socket_address": _socket(HOST, names.port)}],
            "dns_resolver_options": {"no_default_search_domain": True},
        },
    }
    return found


@contextmanager
def envoy(servers: Fleet, names: Names, folder: Path, *, name: str = "dqkv.test") -> Iterator[str]:
    """Envoy in front of the servers that have this name; where it takes calls. Ended afterwards."""
    configuration = folder / "envoy.yaml"
    configuration.write_text(yaml.safe_dump(configured(servers, names, name)))
    log = folder / "envoy.log"
    # --use-dynamic-base-id: another Envoy of this machine is no concern of this one.
    command = [PROGRAM, "--config-path", configuration, "--use-dynamic-base-id", "--concurrency", "1"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "starting workers" in log.read_text() or process.poll() is not None, "Envoy starts")
        assert process.poll() is None, log.read_text()
        yield f"{HOST}:{servers.port}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        finally:
            process.kill()
            process.wait()


def _socket(address: str, port: int) -> dict[str, Any]:
    return {"address": address, "port_value": port}
