"""The manifests of a Ray cluster: their settings and ports are the server's, and the head's command serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rig.answers import arguments, assert_right, drawn_problem
from rig.cluster import room_for_ray, serving
from rig.deployed import DEPLOY, environment_of, find, given

import dqkv
from dqkv.settings import Settings

OPTIONS = "dqkv ray --workers 2 --cpus 8 --gpus 1"
"""As the head is given them; what is tested here has neither so many nodes nor GPUs."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [find("kubectl"), "kustomize", DEPLOY / "ray"], capture_output=True, text=True, check=True, timeout=120
    )
    return {found["kind"]: found for found in yaml.safe_load_all(done.stdout)}


@pytest.fixture(scope="module")
def head(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = manifests["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    return container


@pytest.fixture(scope="module")
def group(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (found,) = manifests["RayCluster"]["spec"]["workerGroupSpecs"]
    return found


@pytest.fixture(scope="module")
def worker(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    return container


def settings_of(container: dict[str, Any]) -> Settings:
    environment = environment_of(container)
    return Settings.load(**given({name: value for name, value in environment.items() if name.startswith("DQKV_")}))


def test_every_variable_is_a_setting_and_memory_holds_what_is_staged(
    head: dict[str, Any], worker: dict[str, Any]
) -> None:
    for container in (head, worker):
        limit_nbytes = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
        assert settings_of(container).staging_bytes < limit_nbytes


def test_the_front_listens_where_its_service_and_its_probes_ask(
    manifests: dict[str, dict[str, Any]], head: dict[str, Any]
) -> None:
    settings = settings_of(head)
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    wanted = {"grpc": settings.port, "stream": settings.stream_port}
    assert {port["name"]: port["port"] for port in manifests["Service"]["spec"]["ports"]} == wanted
    assert ports.items() >= {**wanted, "http": settings.http_port}.items()
    assert {head[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {"http"}


def test_workers_are_as_many_and_as_large_as_the_front_asks_for(
    head: dict[str, Any], group: dict[str, Any], worker: dict[str, Any]
) -> None:
    (command,) = head["args"]
    assert OPTIONS in command
    asked = dict(zip(OPTIONS.split()[2::2], OPTIONS.split()[3::2], strict=True))
    assert {group["replicas"], group["minReplicas"], group["maxReplicas"]} == {int(asked["--workers"])}
    assert worker["resources"]["limits"]["cpu"] == asked["--cpus"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == asked["--gpus"]
    assert {worker[probe]["tcpSocket"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        int(group["rayStartParams"]["node-manager-port"])
    }


def test_the_head_s_command_starts_ray_serves_and_drains(head: dict[str, Any]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    (script,) = head["args"]
    assert head["command"] == ["/bin/bash", "-c", "--"]
    # The container ends with its first process; here Ray outlives it, and must not hold its log open.
    script = script.replace(OPTIONS, "dqkv ray --workers 1").replace("_CMD &", "_CMD 2>/dev/null &")
    with room_for_ray(cpus=1) as cluster:
        environment = cluster.environment
        environment |= {
            "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
            "KUBERAY_GEN_RAY_START_CMD": " ".join(cluster.command),
            # As KubeRay sets it.
            "RAY_ADDRESS": cluster.address,
        }
        cluster.process = process = subprocess.Popen(
            [*head["command"], script], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        with serving(process) as front:
            drawn = drawn_problem()
            with dqkv.Client(front.target) as client:
                assert_right(drawn, client.backward(**arguments(drawn)))
            assert cluster.workers()
            # The front is the shell's own process, which the container's SIGTERM goes to.
            assert front.stop() == 0
