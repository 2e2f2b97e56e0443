"""A real Prometheus with the files of deploy/: it scrapes a real server, and every expression means something to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rig.deployed import DEPLOY, find
from rig.prometheus import Prometheus, running_prometheus
from rig.server import Running, eventually, open_channel, running
from rig.wire import frames_of, sample, stream, streamed_gradients, unary_request

from dqkv.v1 import gradient_pb2_grpc as stubs
from monitoring.alerts import JOB

PANELS = json.loads((DEPLOY / "grafana" / "dashboards" / "dqkv.json").read_text())["panels"]
VARIABLES = {"$job": ".+", "$instance": ".+", "$__rate_interval": "5m"}

COUNTED = (
    'dqkv_requests_total{transport="unary", code="OK"}',
    'dqkv_requests_total{transport="stream", code="OK"}',
    'dqkv_phase_duration_seconds_count{phase="send"}',
    "dqkv_cost_prediction_ratio_count",
    "dqkv_stream_aborts_total",
)
"""What the work of these tests counts last of all."""

QUIET = {
    "Restarts": "no device's process died",
    "What happened to regions": "no region was registered",
}
"""Panels without a line in a server's first seconds, and why."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as one:
        yield one


@pytest.fixture(scope="module")
def prometheus(server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """As compose.yaml starts it, but for the address of the server, and scraping faster."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{server.address['http_port']}"]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yaml").write_bytes((DEPLOY / "prometheus" / "alerts.yaml").read_bytes())
    with running_prometheus(find("prometheus"), folder / "prometheus.yaml", folder) as one:
        yield one


def lines(panel: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """Each expression as Grafana asks it, and the labels that the names of its lines are made of."""
    for target in panel["targets"]:
        expr = target["expr"]
        for variable, value in VARIABLES.items():
            expr = expr.replace(variable, value)
        yield expr, set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))


def test_the_server_is_scraped_and_every_rule_is_evaluated(prometheus: Prometheus, server: Running) -> None:
    eventually(lambda: [found["value"][1] for found in prometheus.query("up")] == ["1"])
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert target["labels"]["job"] == JOB

    def evaluated() -> bool:
        (group,) = prometheus.ask("rules")["groups"]
        return all(rule["health"] == "ok" for rule in group["rules"])

    eventually(evaluated)
    assert prometheus.query('ALERTS{alertstate="firing"}') == []


def grows(prometheus: Prometheus, counter: str) -> bool:
    """Whether some series of a counter was seen to grow from one scrape to another."""
    return any(float(one["value"][1]) > 0 for one in prometheus.query(f"rate({counter}[5m])"))


@pytest.fixture(scope="module")
def used(prometheus: Prometheus, server: Running) -> Prometheus:
    """The Prometheus, after the server has done some work between scrapes."""
    one = sample()
    with open_channel(server.target) as channel, open_channel(server.stream_target) as bulk:

        def work() -> bool:
            stubs.AttentionGradientServiceStub(channel).Backward(unary_request(one), timeout=30)
            streamed_gradients(one, stream(bulk, frames_of(one)))
            # One that does not come whole.
            with pytest.raises(Exception, match="DATA_LOSS"):
                list(stream(bulk, list(frames_of(one))[:-1]))
            return all(grows(prometheus, counter) for counter in COUNTED)

        eventually(work)
    return prometheus


@pytest.mark.parametrize("panel", [panel for panel in PANELS if panel["type"] != "row"], ids=lambda one: one["title"])
def test_every_panel_shows_something(used: Prometheus, panel: dict[str, Any]) -> None:
    for expr, named in lines(panel):
        series = used.query(expr)
        if panel["title"] in QUIET:
            assert series == [], f"no longer quiet: {expr}"
        else:
            assert series, expr
        for one in series:
            assert one["value"][1] != "NaN", expr
            # To Prometheus an empty label is none: what was answered has no reason.
            assert named - {"reason"} <= set(one["metric"]), expr


def test_pods_of_a_cluster_become_targets_by_namespace_and_pod(tmp_path: Path) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yaml").read_text())
    (job,) = config["scrape_configs"]
    (discovery,) = job.pop("kubernetes_sd_configs")
    assert discovery["selectors"] == [{"role": "pod", "label": "app.kubernetes.io/name=dqkv"}]
    # Prometheus of Debian has no Kubernetes in it: what discovery would find comes from a file.
    pods = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {
                "__meta_kubernetes_namespace": "dqkv",
                "__meta_kubernetes_pod_name": "dqkv-7d4b9",
                "__meta_kubernetes_pod_container_port_name": name,
            },
        }
        for name, port in {"grpc": 1, "stream": 2, "http": 3}.items()
    ]
    (tmp_path / "pods.json").write_text(json.dumps(pods))
    job["file_sd_configs"] = [{"files": [str(tmp_path / "pods.json")]}]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with running_prometheus(find("prometheus"), tmp_path / "prometheus.yaml", tmp_path) as one:
        eventually(lambda: bool(one.ask("targets")["activeTargets"]))
        (target,) = one.ask("targets")["activeTargets"]
    assert target["scrapeUrl"] == "http://127.0.0.1:3/metrics"
    assert target["labels"] == {"job": JOB, "instance": "dqkv-7d4b9", "namespace": "dqkv", "pod": "dqkv-7d4b9"}
