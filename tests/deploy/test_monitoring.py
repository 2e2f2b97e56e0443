"""Alert rules and dashboard: kept as generated, over metrics and labels that exist, firing when they should."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from rig.deployed import DEPLOY, ROOT

from dqkv import metrics
from dqkv.v1 import gradient_pb2 as pb
from monitoring import alerts
from monitoring.promql import TARGET, Like, Scope, series_of

KEPT = ("prometheus/alerts.yaml", "grafana/dashboards/dqkv.json")
DASHBOARD = json.loads((DEPLOY / KEPT[1]).read_text())
RULES = yaml.safe_load((DEPLOY / KEPT[0]).read_text())["groups"][0]["rules"]

OF_PROMETHEUS = {"up": TARGET, "ALERTS": ("alertname", "alertstate")}
"""Series that Prometheus makes itself."""


NAMES = {name: metric for metric in metrics.declarations() for name in series_of(metric)}


def expressions() -> Iterator[tuple[str, str, str]]:
    """Where an expression stands, itself, and its legend."""
    for rule in RULES:
        yield rule["alert"], rule["expr"], ""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target.get("legendFormat", "")


EXPRESSIONS = [pytest.param(expr, legend, id=where) for where, expr, legend in expressions()]


@pytest.mark.parametrize("file", KEPT)
def test_what_is_kept_is_what_is_generated(tmp_path: Path, file: str) -> None:
    command = [sys.executable, "-m", "monitoring", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "deploy", check=True, timeout=60)
    assert (tmp_path / file).read_text() == (DEPLOY / file).read_text(), "run make monitoring"


@pytest.mark.parametrize(("expr", "legend"), EXPRESSIONS)
def test_every_metric_and_label_that_is_named_exists(expr: str, legend: str) -> None:
    labels: set[str] = set()
    wanted: set[str] = set(re.findall(r"\{\{(\w+)\}\}", legend))

    def visit(part: object) -> None:
        match part:
            case promql.VectorSelector():
                assert part.name in OF_PROMETHEUS or part.name in NAMES, part.name
                own = labels_of(part.name)
                assert {matcher.name for matcher in part.matchers.matchers} <= own
                labels.update(own)
            case promql.AggregateExpr() if part.modifier is not None:
                wanted.update(part.modifier.labels)
            case promql.BinaryExpr() if part.modifier is not None and part.modifier.matching is not None:
                wanted.update(part.modifier.matching.labels)

    promql.walk(promql.parse(expr.replace("$__rate_interval", "5m")), visit)
    assert labels or expr.startswith("vector")
    assert wanted <= labels


def labels_of(name: str) -> set[str]:
    """Labels of the series of this name."""
    if name in OF_PROMETHEUS:
        return set(OF_PROMETHEUS[name])
    return {*NAMES[name].labels, *TARGET, *(["le"] if name.endswith("_bucket") else [])}


@pytest.mark.parametrize("name", sorted(metric.name for metric in metrics.declarations()))
def test_every_metric_is_shown(name: str) -> None:
    shown = " ".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ()))
    assert re.search(rf"\b{name}(_bucket|_sum|_count)?\b", shown)


def test_the_rpcs_that_the_rules_name_exist() -> None:
    service = pb.DESCRIPTOR.services_by_name["AttentionGradientService"]
    assert set(alerts.BACKWARD.split("|")) <= {method.name for method in service.methods}


# ---- the dashboard
def test_panels_have_a_title_a_meaning_and_a_unit_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + column, place["y"] + row) for column in range(place["w"]) for row in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"].endswith(".") or panel["description"] in _helps()
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "${datasource}"


def _helps() -> set[str]:
    return {metric.help for metric in metrics.declarations()}


def test_the_unit_of_a_panel_is_that_of_its_metrics() -> None:
    wanted = {"s": r"_seconds", "bytes": r"_bytes\b", "Bps": r"rate\(dqkv_bytes_total", "flops": r"rate\(dqkv_flops"}
    for panel in DASHBOARD["panels"]:
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
        for target in panel.get("targets", ()):
            if unit in wanted:
                assert re.search(wanted[unit], target["expr"]), panel["title"]
            if unit in {"reqps", "cps"}:
                assert "rate(" in target["expr"], panel["title"]


def test_names_of_panels_are_their_own() -> None:
    titles = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len(titles) == len(set(titles))


# ---- the rules
def test_promtool_accepts_the_rules(promtool: str) -> None:
    check = subprocess.run(
        [promtool, "check", "rules", "--lint-fatal", str(DEPLOY / KEPT[0])], capture_output=True, text=True, timeout=60
    )
    assert check.returncode == 0, check.stderr
    assert f"{len(RULES)} rules found" in check.stdout


def test_alerts_fire_when_they_should_and_else_do_not(promtool: str) -> None:
    command = [promtool, "test", "rules", "alerts.yaml"]
    check = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60)
    assert check.returncode == 0, check.stdout + check.stderr


def test_every_alert_has_a_scenario_in_which_it_fires() -> None:
    scenarios = yaml.safe_load(Path(__file__).with_name("alerts.yaml").read_text())["tests"]
    fired = {case["alertname"] for one in scenarios for case in one["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_says_where_and_what_to_do(rule: dict[str, Any]) -> None:
    summary, description = rule["annotations"]["summary"], rule["annotations"]["description"]
    assert "$labels.instance" in summary or rule["expr"].startswith("absent(")
    assert description.endswith(".")
    assert rule["labels"]["severity"] in {"critical", "warning"}


# ---- what they are made with
def test_an_unknown_label_or_bound_is_refused() -> None:
    scope = Scope(window="5m")
    with pytest.raises(ValueError, match="dqkv_queue_depth has no label tenant, but device"):
        scope.of(metrics.QUEUE_DEPTH, tenant="a")
    with pytest.raises(ValueError, match="has no label shape"):
        scope.per_second(metrics.REQUESTS, "shape")
    with pytest.raises(ValueError, match="has no label transport"):
        scope.quantile(0.5, metrics.PHASE_SECONDS, "transport")
    with pytest.raises(ValueError, match="has no bound 3"):
        scope.observed(metrics.PREDICTION_RATIO, le=3)


def test_expressions_are_spelled_as_prometheus_reads_them() -> None:
    scope = Scope(window="1m", matchers='job="a"')
    assert scope.of(metrics.INFLIGHT) == 'dqkv_inflight_requests{job="a"}'
    assert Scope(window="1m").of(metrics.INFLIGHT) == "dqkv_inflight_requests"
    assert scope.per_second(metrics.REQUESTS, "code", rpc=Like("A|B")) == (
        'sum by (code) (rate(dqkv_requests_total{job="a", rpc=~"A|B"}[1m]))'
    )
    assert scope.observed(metrics.PREDICTION_RATIO, le=4) == (
        'sum(rate(dqkv_cost_prediction_ratio_bucket{job="a", le="4.0"}[1m]))'
    )
    assert scope.total(metrics.PHASE_SECONDS, "phase") == (
        'sum by (phase) (rate(dqkv_phase_duration_seconds_sum{job="a"}[1m]))'
    )
    assert scope.quantile(0.5, metrics.PREDICTION_RATIO, "arch") == (
        'histogram_quantile(0.5, sum by (le, arch) (rate(dqkv_cost_prediction_ratio_bucket{job="a"}[1m])))'
    )
