"""The manifests against the server that they start: settings, ports, paths and times are its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Gauge
from rig.deployed import DEPLOY, OVERLAYS, ROOT, Manifests, environment_of, given, nbytes, pod_of, server_of
from rig.pki import Authority
from rig.server import running

from dqkv import metrics
from dqkv.backend import findings
from dqkv.backend.life import DeviceSettings
from dqkv.server import core, grpc_servers
from dqkv.server.http_app import Sources, make_app
from dqkv.settings import Settings, SettingsInvalid, is_loopback
from monitoring.promql import Scope

Render = Callable[[str], Manifests]
SERVERS = [name for name in OVERLAYS if name != "sidecar"]


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest, render: Render) -> Manifests:
    return render(request.param)


@pytest.fixture
def pod(manifests: Manifests) -> dict[str, Any]:
    return pod_of(manifests)


@pytest.fixture
def server(pod: dict[str, Any]) -> dict[str, Any]:
    return server_of(pod)


@pytest.fixture
def settings(server: dict[str, Any]) -> Settings:
    return Settings.load(**given(environment_of(server)))


def test_every_variable_is_a_setting_and_they_go_together(settings: Settings) -> None:
    assert settings.log_format == "json"


def test_ports_are_the_settings_defaults(server: dict[str, Any], settings: Settings) -> None:
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    default = Settings.load()
    wanted = {"grpc": default.port, "stream": default.stream_port, "http": default.http_port}
    assert wanted == {"grpc": settings.port, "stream": settings.stream_port, "http": settings.http_port}
    assert ports.items() <= wanted.items()
    assert "http" in ports


def test_probes_ask_for_paths_that_exist_at_a_port_that_the_node_reaches(
    server: dict[str, Any], settings: Settings
) -> None:
    paths = make_app(Sources(failing=list, info=lambda: None, exposition=bytes), version="0").openapi()["paths"]
    named = {port["name"] for port in server["ports"]}
    for kind, path in {"startupProbe": "/readyz", "livenessProbe": "/livez", "readinessProbe": "/readyz"}.items():
        probe = server[kind]["httpGet"]
        assert probe["path"] == path
        assert path in paths
        assert probe["port"] in named
        assert server[kind]["timeoutSeconds"] <= server[kind]["periodSeconds"]
    assert not is_loopback(settings.http_host)


def test_a_slow_start_is_waited_for(server: dict[str, Any]) -> None:
    allowed_s = server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"]
    assert allowed_s > findings.PROBE_TIMEOUT_S + core.GPU_START_TIMEOUT_S


@pytest.mark.parametrize("overlay", SERVERS)
def test_the_grace_covers_the_drain_and_a_device_that_does_not_stop(render: Render, overlay: str) -> None:
    pod = pod_of(render(overlay))
    server = server_of(pod)
    settings = Settings.load(**given(environment_of(server)))
    sleep_s = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    device = DeviceSettings(name="cuda:0", num_threads=1)
    end_s = device.cancel_timeout_s + device.stop_timeout_s + grpc_servers.STOP_GRACE_S + grpc_servers.LINGER_S
    assert pod["terminationGracePeriodSeconds"] > sleep_s + settings.drain_s + end_s
    longest_launch_s = 30
    assert settings.drain_s >= settings.queue_seconds + longest_launch_s
    # Callers have to see it gone before it is: readiness fails within this time.
    assert sleep_s > 2 * server["readinessProbe"]["periodSeconds"]


def test_it_runs_without_any_privilege(pod: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        # What is written goes here; the root cannot take it.
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_its_user_is_the_image_s(pod: dict[str, Any]) -> None:
    user = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[-1]
    security = pod["securityContext"]
    assert user == (str(security["runAsUser"]), str(security["runAsGroup"]))


def test_no_variable_of_a_service_is_taken_for_a_setting(pod: dict[str, Any]) -> None:
    with pytest.raises(SettingsInvalid):
        Settings.load(**given({"DQKV_METRICS_PORT": "tcp://10.0.0.1:8080"}))
    assert pod["enableServiceLinks"] is False


def test_memory_holds_what_is_staged_and_what_computes(server: dict[str, Any], settings: Settings) -> None:
    resources = server["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert nbytes(resources["limits"]["memory"]) >= 2 * settings.staging_bytes
    assert settings.cpu_threads == int(resources["limits"]["cpu"])


@pytest.mark.parametrize("overlay", SERVERS)
def test_one_gpu_a_pod_and_none_where_the_cpu_computes(render: Render, overlay: str) -> None:
    server = server_of(pod_of(render(overlay)))
    settings = Settings.load(**given(environment_of(server)))
    gpus = int(server["resources"]["limits"].get("nvidia.com/gpu", 0))
    if overlay == "cpu":
        assert (gpus, settings.gpu_indices, settings.cpu_devices) == (0, (), 1)
        assert server["image"].endswith("-cpu")
    else:
        assert (gpus, settings.gpu_indices, settings.cpu_devices) == (1, (0,), 0)
        assert server["image"].endswith("-gpu")


@pytest.mark.parametrize("overlay", SERVERS)
def test_what_points_at_the_pods_finds_them(render: Render, overlay: str) -> None:
    manifests = render(overlay)
    deployment, service = manifests["Deployment"], manifests["Service"]["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        service["selector"],
        manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        pod_of(manifests)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ):
        assert selector
        assert selector.items() <= labels
    # Headless: the client sees every server's address.
    assert service["clusterIP"] == "None"
    ports = {port["name"]: port["containerPort"] for port in server_of(pod_of(manifests))["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == {
        name: ports[name] for name in ("grpc", "stream")
    }


@pytest.mark.parametrize("overlay", SERVERS)
def test_strangers_reach_nothing_and_callers_no_metrics(render: Render, overlay: str) -> None:
    policy = render(overlay)["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy
    allowed = [{port["port"] for port in rule["ports"]} for rule in policy["ingress"]]
    assert allowed == [{"grpc", "stream"}, {"http"}]
    for rule in policy["ingress"]:
        assert all(source["namespaceSelector"]["matchLabels"] for source in rule["from"])


def test_every_version_is_the_project_s(server: dict[str, Any]) -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert server["image"].startswith(f"dqkv:{version[1]}-")


# ---- autoscaling
@pytest.mark.parametrize("overlay", ["gpu", "tls"])
def test_servers_are_added_before_their_queue_is_full(render: Render, overlay: str) -> None:
    manifests = render(overlay)
    scaler = manifests["HorizontalPodAutoscaler"]["spec"]
    (metric,) = (entry["pods"] for entry in scaler["metrics"])
    settings = Settings.load(**given(environment_of(server_of(pod_of(manifests)))))
    assert metric["metric"]["name"] == metrics.QUEUE_SECONDS.name
    assert metrics.QUEUE_SECONDS.kind is Gauge
    assert float(metric["target"]["averageValue"]) < settings.queue_seconds / 2
    assert scaler["scaleTargetRef"]["name"] == manifests["Deployment"]["metadata"]["name"]
    # A number of its own would be set back at every apply.
    assert "replicas" not in manifests["Deployment"]["spec"]


def test_the_adapter_serves_the_metric_that_the_autoscaler_asks_for() -> None:
    path = DEPLOY / "k8s" / "components" / "autoscale" / "prometheus-adapter.yaml"
    (rule,) = yaml.safe_load(path.read_text())["rules"]["custom"]
    series = Scope(window="1m").of(metrics.QUEUE_SECONDS)
    assert rule["seriesQuery"].startswith(f"{series}{{")
    discovered = (DEPLOY / "prometheus" / "kubernetes.yaml").read_text()
    for label in ("namespace", "pod"):
        assert f'{label}!=""' in rule["seriesQuery"]
        assert f"target_label: {label}\n" in discovered


# ---- TLS
def test_tls_is_on_and_its_files_are_the_secret_s(render: Render) -> None:
    pod = pod_of(render("tls"))
    server = server_of(pod)
    settings = Settings.load(**given(environment_of(server)))
    assert settings.insecure_bind is False
    files = (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    # Those that cert-manager writes.
    assert [file.name for file in files if file] == ["tls.crt", "tls.key", "ca.crt"]
    mounted = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for file in files:
        assert file is not None
        secret = volumes[mounted[str(file.parent)]]["secret"]
        assert secret["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_without_tls_it_says_so(render: Render, overlay: str) -> None:
    environment = environment_of(server_of(pod_of(render(overlay))))
    assert environment.pop("DQKV_INSECURE_BIND") == "true"
    with pytest.raises(SettingsInvalid, match="DQKV_INSECURE_BIND"):
        Settings.load(**given(environment))


# ---- beside a trainer
def test_a_trainer_s_own_server_starts_first_and_shares_memory_with_it_alone(render: Render) -> None:
    pod = pod_of(render("sidecar"))
    server, (trainer,) = server_of(pod), pod["containers"]
    settings = Settings.load(**given(environment_of(server)))
    # An init container that is restarted is a sidecar: ready before the others start.
    assert server in pod["initContainers"]
    assert server["restartPolicy"] == "Always"
    assert is_loopback(settings.host)
    assert pod["shareProcessNamespace"] is True
    # The client opens the socket at the path that the server tells it, and its owner alone may.
    mounts = [
        {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]} for container in (server, trainer)
    ]
    folder = str(Path(settings.region_socket).parent)
    assert mounts[0][folder] == mounts[1][folder]
    assert mounts[0]["/dev/shm"] == mounts[1]["/dev/shm"]
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    assert volumes[mounts[0]["/dev/shm"]]["medium"] == "Memory"
    for container in (server, trainer):
        assert "runAsUser" not in container["securityContext"]
        assert nbytes(volumes["shm"]["sizeLimit"]) < nbytes(container["resources"]["limits"]["memory"])


# ---- for real
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_environment_of_an_overlay_starts_a_server_that_its_probes_find_well(
    render: Render, overlay: str, tmp_path: Path
) -> None:
    pod = pod_of(render(overlay))
    server = server_of(pod)
    # What is another machine's: its addresses, its GPU, the files of its secret.
    own = given(environment_of(server))
    own |= {"host": "127.0.0.1", "http_host": "127.0.0.1", "gpus": "none", "cpu_devices": "1"}
    if overlay == "tls":
        authority = Authority(tmp_path, "ca")
        issued = authority.issue("dqkv.dqkv.svc")
        own |= {"tls_cert": issued.certificate, "tls_key": issued.key, "tls_client_ca": authority.root}
    if overlay == "sidecar":
        own["region_socket"] = tmp_path / "regions"
    with running(**{name: str(value) for name, value in own.items()}) as one:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert one.http(server[kind]["httpGet"]["path"])[0] == 200
        if overlay == "sidecar":
            command, address = pod["containers"][0]["args"]
            assert address == f"{environment_of(server)['DQKV_HOST']}:{Settings.load().port}"
            asked = [sys.executable, "-m", "dqkv", command, one.target]
            check = subprocess.run(asked, capture_output=True, text=True, timeout=100)
            assert check.returncode == 0, check.stdout + check.stderr
            assert "region" in check.stdout
        assert one.stop() == 0
