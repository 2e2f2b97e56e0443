"""compose.yaml: both profiles start a server, the Prometheus that scrapes it, and the Grafana that shows it."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from rig.deployed import DEPLOY, given

from dqkv.backend.life import DeviceSettings
from dqkv.server import grpc_servers
from dqkv.settings import Settings
from monitoring.alerts import JOB
from monitoring.dashboard import UID

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROFILES = ("cpu", "gpu")


def started(profile: str) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in SERVICES.items() if profile in service["profiles"]}


def settings_of(server: dict[str, Any]) -> Settings:
    return Settings.load(**given(server["environment"]))


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Where each file or folder of ours lies inside; only those of the project, which are only read."""
    ours = [volume.split(":") for volume in service["volumes"] if volume.startswith("./")]
    assert all(options == "ro" for _, _, options in ours)
    return {inside: outside for outside, inside, _ in ours}


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_starts_one_of_each(profile: str) -> None:
    assert sorted(started(profile)) == ["grafana", "prometheus", f"server-{profile}"]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_server_is_confined_and_reached_from_this_machine_alone(profile: str) -> None:
    server = SERVICES[f"server-{profile}"]
    settings = settings_of(server)
    assert server["build"]["args"]["VARIANT"] == profile
    assert server["read_only"] is True
    for service in started(profile).values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    ports = {int(port.rsplit(":", 1)[1]) for port in server["ports"]}
    assert ports == {settings.port, settings.stream_port, settings.http_port}


@pytest.mark.parametrize("profile", PROFILES)
def test_it_may_drain(profile: str) -> None:
    server = SERVICES[f"server-{profile}"]
    device = DeviceSettings(name="cuda:0", num_threads=1)
    end_s = device.cancel_timeout_s + device.stop_timeout_s + grpc_servers.STOP_GRACE_S + grpc_servers.LINGER_S
    assert int(server["stop_grace_period"].removesuffix("s")) > settings_of(server).drain_s + end_s


def test_only_the_gpu_profile_asks_for_gpus_and_then_computes_on_nothing_else() -> None:
    (device,) = SERVICES["server-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert settings_of(SERVICES["server-gpu"]).cpu_devices == 0
    assert "deploy" not in SERVICES["server-cpu"]


def test_everything_that_is_mounted_is_there_and_every_image_has_a_version() -> None:
    for service in SERVICES.values():
        assert ":" in service["image"]
        assert not service["image"].endswith(":latest")
        for outside in mounts(service).values() if "volumes" in service else ():
            assert (DEPLOY / outside).exists()


@pytest.mark.parametrize("profile", PROFILES)
def test_prometheus_scrapes_the_server_as_the_job_of_the_rules(profile: str) -> None:
    prometheus = SERVICES["prometheus"]
    (inside,) = (flag.partition("=")[2] for flag in prometheus["command"] if flag.startswith("--config.file="))
    folder, _, name = inside.rpartition("/")
    config = yaml.safe_load((DEPLOY / mounts(prometheus)[folder] / name).read_text())
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.rpartition(":")
    server = SERVICES[f"server-{profile}"]
    assert job["job_name"] == JOB
    assert host in server["networks"]["default"]["aliases"]
    assert int(port) == settings_of(server).http_port
    assert config["rule_files"] == ["alerts.yaml"]


def test_grafana_is_provisioned_with_prometheus_and_the_dashboard_as_its_home() -> None:
    grafana = SERVICES["grafana"]
    inside = {inside: DEPLOY / outside for inside, outside in mounts(grafana).items()}
    provisioning = inside["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    url = urlsplit(source["url"])
    assert url.hostname in SERVICES
    assert SERVICES[str(url.hostname)]["ports"] == [f"127.0.0.1:{url.port}:{url.port}"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "dqkv.yaml").read_text())["providers"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{UID}.json"
    assert (inside[provider["options"]["path"]] / f"{UID}.json").is_file()
    # Nobody can log in, so no password is left at its default.
    assert grafana["environment"]["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert grafana["environment"]["GF_AUTH_BASIC_ENABLED"] == "false"
