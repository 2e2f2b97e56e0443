"""The dashboard: from "is it well" at the top to every metric that no panel was composed for at the bottom."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.models import dashboard as models
from prometheus_client import Counter, Gauge

from dqkv import metrics
from dqkv.backend.base import DeviceState
from dqkv.metrics import Declared
from dqkv.settings import Settings
from monitoring.alerts import BACKWARD
from monitoring.panels import SOURCE, WIDTH, About, Line, Step, facts, lines, number, states
from monitoring.promql import Scope, series_of

UID = "dqkv"
_DEVICE = "{{instance}} {{device}}"
_SHARES = (0.5, 0.9, 0.99)
_SCOPE = Scope(window="$__rate_interval", matchers='job=~"$job", instance=~"$instance"')
_HALF, _THIRD = WIDTH // 2, WIDTH // 3
_QUEUE_LIMIT_S = float(Settings.model_fields["queue_seconds"].default)


def dashboard() -> models.Dashboard:
    """The whole dashboard, as Grafana reads it once it is written as JSON."""
    build = metrics.BUILD_INFO.name
    board = (
        boards.Dashboard("dqkv")
        .uid(UID)
        .description("Servers of attention gradients: who asks, what they wait for, what the devices do.")
        .tags(["dqkv"])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .editable()
        .with_variable(boards.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_choice("job", "Job", f"label_values({build}, job)"))
        .with_variable(_choice("instance", "Server", f'label_values({build}{{job=~"$job"}}, instance)'))
        .annotation(
            boards.AnnotationQuery()
            .name("Firing alerts")
            .datasource(SOURCE)
            .enable(True)
            .icon_color("red")
            .expr('ALERTS{alertname=~"Dqkv.+", alertstate="firing"}')
        )
    )
    composed = {title: panels() for title, panels in _ROWS.items()}
    built = [panel.build() for panels in composed.values() for panel in panels]
    shown = {word for panel in built for target in panel.targets for word in re.findall(r"\w+", target.expr)}
    # No metric is forgotten.
    rest = [_plain(metric) for metric in metrics.declarations() if not series_of(metric) & shown]
    for title, panels in (composed | {"Everything else": rest}).items():
        board.with_row(boards.Row(title))
        for panel in panels:
            board.with_panel(panel)
    return board.build()


def _choice(name: str, label: str, query: str) -> boards.QueryVariable:
    return (
        boards.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _now() -> Sequence[Any]:
    state = metrics.DEVICE_STATE
    working = f"sum({_SCOPE.of(state, state=DeviceState.OK.value)}) or vector(0)"
    away = f"count({_SCOPE.of(state, state=DeviceState.OK.value)} == 0) or vector(0)"
    asked = _SCOPE.per_second(metrics.REQUESTS, rpc=BACKWARD)
    answered = _SCOPE.per_second(metrics.REQUESTS, rpc=BACKWARD, code="OK")
    shortest = f"max(min by (instance) ({_SCOPE.of(metrics.QUEUE_SECONDS)}))"
    late = _SCOPE.quantile(0.99, metrics.REQUEST_SECONDS, rpc=BACKWARD)
    firing = 'count(ALERTS{alertname=~"Dqkv.+", alertstate="firing"}) or vector(0)'
    tiles: tuple[tuple[str, str, str, str, list[Step]], ...] = (
        ("Firing alerts", "Of the rules kept beside this dashboard.", "none", firing, [Step(at=1, color="red")]),
        ("Servers", "Servers that are scraped and answer.", "none", f"sum(up{{{_SCOPE.matchers}}})", []),
        ("Devices at work", state.help + ": ok.", "none", working, []),
        ("Devices away", "Devices that start or are lost.", "none", away, [Step(at=1, color="red")]),
        ("Gradients", "Requests for gradients that end, whatever their code.", "reqps", asked, []),
        (
            "Not answered",
            "Share of requests for gradients that end with an error of any kind.",
            "percentunit",
            f"1 - ({answered} or vector(0)) / ({asked} > 0)",
            [Step(at=0.01, color="orange"), Step(at=0.05, color="red")],
        ),
        ("Slowest 1 %", "99 % of requests for gradients end within this time.", "s", late, []),
        (
            "Longest wait",
            f"{metrics.QUEUE_SECONDS.help}: the shortest queue of the busiest server. The signal for autoscaling.",
            "s",
            shortest,
            [Step(at=_QUEUE_LIMIT_S / 2, color="orange"), Step(at=_QUEUE_LIMIT_S, color="red")],
        ),
    )
    columns = WIDTH // len(tiles)
    return [
        number(About(title=title, meaning=meaning, unit=unit, columns=columns, rows=4), expr, *steps)
        for title, meaning, unit, expr, steps in tiles
    ]


def _requests() -> Sequence[Any]:
    return [
        lines(
            About(title="How gradients end", meaning=metrics.REQUESTS.help, unit="reqps", columns=_HALF),
            Line(
                expr=_SCOPE.per_second(metrics.REQUESTS, "code", "reason", rpc=BACKWARD),
                legend="{{code}} {{reason}}",
            ),
            stacked=True,
        ),
        lines(
            About(
                title="How long a request for gradients takes",
                meaning=f"{metrics.REQUEST_SECONDS.help}. The longest time told apart is "
                f"{metrics.REQUEST_SECONDS.buckets[-1]:g} s.",
                unit="s",
                columns=_HALF,
            ),
            *(
                Line(
                    expr=_SCOPE.quantile(share, metrics.REQUEST_SECONDS, "transport", rpc=BACKWARD),
                    legend=f"{share:.0%} {{{{transport}}}}",
                )
                for share in _SHARES
            ),
        ),
        lines(
            About(
                title="Where the time goes",
                meaning=f"{metrics.PHASE_SECONDS.help}, mean of all.",
                unit="s",
                columns=_HALF,
            ),
            Line(expr=_mean_phase(), legend="{{phase}}"),
            stacked=True,
        ),
        lines(
            About(title="All calls by method", meaning=metrics.RPCS_HANDLED.help, unit="reqps", columns=_HALF),
            Line(
                expr=_SCOPE.per_second(metrics.RPCS_HANDLED, "grpc_method", "grpc_code"),
                legend="{{grpc_method}} {{grpc_code}}",
            ),
        ),
    ]


def _mean_phase() -> str:
    """Seconds of each phase for an answered request; each has one computation."""
    spent = _SCOPE.total(metrics.PHASE_SECONDS, "phase")
    return f"{spent} / ignoring(phase) group_left {_SCOPE.observed(metrics.PHASE_SECONDS, phase='compute')}"


def _devices() -> Sequence[Any]:
    state, by = metrics.DEVICE_STATE, ("instance", "device")
    one = f"sum by ({', '.join(by)})"
    in_state = (
        f"2 * {one} ({_SCOPE.of(state, state=DeviceState.OK.value)})"
        f" + {one} ({_SCOPE.of(state, state=DeviceState.STARTING.value)})"
    )
    full = Step(at=_QUEUE_LIMIT_S, color="red")
    return [
        states(
            About(title="State of each device", meaning=state.help, unit="none", columns=_HALF),
            Line(expr=in_state, legend=_DEVICE),
            {2: ("ok", "green"), 1: ("starting", "yellow"), 0: ("lost", "red")},
        ),
        lines(
            About(
                title="Work that waits",
                meaning=f"{metrics.QUEUE_SECONDS.help}. At DQKV_QUEUE_SECONDS (dashed: its default) work is refused.",
                unit="s",
                columns=_HALF,
            ),
            Line(expr=_SCOPE.of(metrics.QUEUE_SECONDS), legend=_DEVICE),
            limit=full,
        ),
        lines(
            About(
                title="How busy each device is",
                meaning="Share of the time in which it computes.",
                unit="percentunit",
                columns=_THIRD,
            ),
            Line(expr=_SCOPE.total(metrics.PHASE_SECONDS, *by, phase="compute"), legend=_DEVICE),
        ),
        lines(
            About(title="Arithmetic", meaning=metrics.FLOPS.help, unit="flops", columns=_THIRD),
            Line(expr=_SCOPE.per_second(metrics.FLOPS, *by, "arch"), legend=f"{_DEVICE} {{{{arch}}}}"),
        ),
        lines(
            About(
                title="How right predictions are",
                meaning=f"{metrics.PREDICTION_RATIO.help}: 1 is right. Admission and autoscaling rest on it.",
                unit="none",
                columns=_THIRD,
            ),
            *(
                Line(expr=_SCOPE.quantile(share, metrics.PREDICTION_RATIO, "arch"), legend=f"{share:.0%} {{{{arch}}}}")
                for share in (0.1, 0.5, 0.9)
            ),
        ),
    ]


def _servers() -> Sequence[Any]:
    return [
        facts(
            About(title="Versions", meaning="What each server runs.", unit="none", columns=_THIRD),
            _SCOPE.of(metrics.BUILD_INFO),
            {"instance": "server", "version": "dqkv", "torch": "torch", "grpcio": "grpcio"},
        ),
        lines(
            About(
                title="Calls that began and have not ended",
                meaning=f"{metrics.RPCS_STARTED.help} less the finished ones, those that wait for their turn included.",
                unit="none",
                columns=_THIRD,
            ),
            Line(
                expr=f"sum by (instance) ({_SCOPE.of(metrics.RPCS_STARTED)})"
                f" - sum by (instance) ({_SCOPE.of(metrics.RPCS_HANDLED)})",
                legend="{{instance}}",
            ),
        ),
        lines(
            About(title="Restarts", meaning=metrics.RESTARTS.help + ", in the last hour.", unit="none", columns=_THIRD),
            Line(expr=f"increase({_SCOPE.of(metrics.RESTARTS)}[1h])", legend=f"{_DEVICE} {{{{cause}}}}"),
        ),
    ]


def _plain(metric: Declared[Any]) -> Any:
    """A panel of one metric by its kind: a gauge as it is, a counter a second, a histogram by its quantiles."""
    columns = About(title=metric.help, meaning=metric.name + ".", unit=_unit(metric), columns=_THIRD)
    names = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    if metric.kind is Gauge:
        return lines(columns, Line(expr=_SCOPE.of(metric), legend=f"{{{{instance}}}} {names}".strip()))
    if metric.kind is Counter:
        return lines(columns, Line(expr=_SCOPE.per_second(metric, *metric.labels), legend=names or "all"))
    return lines(
        columns,
        *(
            Line(expr=_SCOPE.quantile(share, metric, *metric.labels), legend=f"{share:.0%} {names}".strip())
            for share in _SHARES
        ),
    )


def _unit(metric: Declared[Any]) -> str:
    """What the metric's name says it counts, as Grafana names units."""
    counter = metric.kind is Counter
    if metric.name.removesuffix("_total").endswith("_bytes"):
        return "Bps" if counter else "bytes"
    if metric.name.endswith("_seconds"):
        return "s"
    return "cps" if counter else "short"


_ROWS = {"Now": _now, "Requests": _requests, "Devices": _devices, "Servers": _servers}
