"""What wakes or warns an operator: every alert with its reason, over the metrics that the server declares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dqkv import errors, metrics
from dqkv.backend.base import DeviceState
from dqkv.settings import Settings
from monitoring.promql import TARGET, Like, Scope

JOB = "dqkv"
"""The name under which Prometheus scrapes servers; the rules rest on it."""

BACKWARD = Like("Backward|BackwardStream")
"""The RPCs that ask for gradients."""


class Severity(StrEnum):
    """CRITICAL wakes somebody, WARNING waits for the morning."""

    CRITICAL = "critical"
    WARNING = "warning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One rule: `expr` has to hold for `lasting`; `summary` says what is, `remedy` what to do."""

    name: str
    severity: Severity
    expr: str
    summary: str
    remedy: str
    lasting: str

    def rule(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasting,
            "labels": {"severity": self.severity.value},
            "annotations": {"summary": self.summary, "description": self.remedy},
        }


def alerts() -> list[Alert]:
    """Every alert, the critical ones first."""
    return [*_critical(), *_warnings()]


def rules() -> dict[str, Any]:
    """The file of rules."""
    return {"groups": [{"name": "dqkv", "rules": [alert.rule() for alert in alerts()]}]}


_OF_SERVER = ", ".join(TARGET)
_SCOPE = Scope(window="5m", matchers=f'job="{JOB}"')
_WHERE = "{{ $labels.instance }}"


def _critical() -> list[Alert]:
    up = f'up{{job="{JOB}"}}'
    working = _SCOPE.of(metrics.DEVICE_STATE, state=DeviceState.OK.value)
    return [
        Alert(
            name="DqkvServerDown",
            severity=Severity.CRITICAL,
            expr=f"{up} == 0",
            lasting="1m",
            summary=f"The server at {_WHERE} does not answer",
            remedy="See whether its process lives and what it logged last; callers go on with the other servers.",
        ),
        Alert(
            name="DqkvNoServers",
            severity=Severity.CRITICAL,
            expr=f"absent({up})",
            lasting="5m",
            summary=f"Prometheus finds no server to scrape as job {JOB}",
            remedy="None runs, or discovery or a network policy keeps Prometheus from them; no other alert can fire.",
        ),
        Alert(
            name="DqkvNoDevice",
            severity=Severity.CRITICAL,
            expr=f"sum by ({_OF_SERVER}) ({working}) == 0",
            # A GPU may take three minutes to start from a cold disk.
            lasting="5m",
            summary=f"No device of the server at {_WHERE} takes work",
            remedy="/readyz and /v1/info say why; a lost GPU that does not come back needs its machine looked at.",
        ),
        Alert(
            name="DqkvFault",
            severity=Severity.CRITICAL,
            expr=_appeared(code=errors.InternalFault.status.grpc_name),
            lasting="0m",
            summary=f"The server at {_WHERE} failed in a way that it should not",
            remedy='A defect: the log line with event "fault" has its traceback and request_id.',
        ),
        Alert(
            name="DqkvBytesChanged",
            severity=Severity.CRITICAL,
            expr=_appeared(reason=errors.ChecksumMismatch.reason),
            lasting="0m",
            summary=f"Tensor bytes changed on their way to {_WHERE}",
            remedy="The request was refused and nothing ran. Memory, a network card or a proxy on the way alters data.",
        ),
    ]


def _warnings() -> list[Alert]:
    limit_s = float(Settings.model_fields["queue_seconds"].default)
    queue = _SCOPE.of(metrics.QUEUE_SECONDS)
    lost = _SCOPE.of(metrics.DEVICE_STATE, state=DeviceState.LOST.value)
    restarts = _SCOPE.of(metrics.RESTARTS)
    return [
        Alert(
            name="DqkvDeviceLost",
            severity=Severity.WARNING,
            expr=f"{lost} == 1",
            lasting="2m",
            summary="Device {{ $labels.device }} of " + f"{_WHERE} is lost",
            remedy="Its process is started again and again, and fails; /v1/info has the fault in words.",
        ),
        Alert(
            name="DqkvDeviceRestarts",
            severity=Severity.WARNING,
            # The first death of a kind begins a series, which increase() does not count.
            expr=f"increase({restarts}[30m]) >= 2",
            lasting="0m",
            summary="Device {{ $labels.device }} of " + f"{_WHERE} ended several times " + "({{ $labels.cause }})",
            remedy="What ran there was sent again each time. A signal hints at a memory limit; the log has the rest.",
        ),
        Alert(
            name="DqkvQueueLong",
            severity=Severity.WARNING,
            # The shortest queue: where one device has room, so has the server.
            expr=f"min by ({_OF_SERVER}) ({queue}) > {limit_s / 2:g}",
            lasting="10m",
            summary="Work waits {{ $value | humanizeDuration }} at " + _WHERE,
            remedy=f"At DQKV_QUEUE_SECONDS ({limit_s:g} s by default) work is refused: add servers.",
        ),
        Alert(
            name="DqkvWorkRefused",
            severity=Severity.WARNING,
            expr=f"{_share_of_backward(code=errors.QueueFull.status.grpc_name)} > 0.05",
            lasting="10m",
            summary=_WHERE + " refuses {{ $value | humanizePercentage }} of the gradients that it is asked for",
            remedy="Queue, staging memory or a quota is full, the label reason tells which: add servers or raise it.",
        ),
        Alert(
            name="DqkvDeadlinesMissed",
            severity=Severity.WARNING,
            expr=f"{_share_of_backward(code=errors.WontFinish.status.grpc_name)} > 0.05",
            lasting="10m",
            summary=_WHERE + " misses the deadline of {{ $value | humanizePercentage }} of its requests",
            remedy="Callers give less time than waiting and work take here: add servers, or let callers give more.",
        ),
        Alert(
            name="DqkvWorkLost",
            severity=Severity.WARNING,
            expr=f"{_share_of_backward(reason=Like(f'{errors.DeviceLost.reason}|{errors.DeviceOutOfMemory.reason}'))}"
            " > 0.01",
            lasting="5m",
            summary=_WHERE + " loses {{ $value | humanizePercentage }} of its requests on the device",
            remedy="DEVICE_LOST: its process dies. DEVICE_OOM: requests are larger than the device's memory.",
        ),
        Alert(
            name="DqkvPredictionsOff",
            severity=Severity.WARNING,
            expr=_off_predictions() + " > 0.2",
            lasting="30m",
            summary="{{ $value | humanizePercentage }} of the predicted times at " + _WHERE + " are wrong fourfold",
            remedy="Admission, fairness and autoscaling rest on them: something else uses the device or the cores.",
        ),
    ]


def _share_of_backward(**labels: str) -> str:
    part = _SCOPE.per_second(metrics.REQUESTS, *TARGET, rpc=BACKWARD, **labels)
    return f"{part}\n/\n{_SCOPE.per_second(metrics.REQUESTS, *TARGET, rpc=BACKWARD)}"


def _appeared(**labels: str) -> str:
    """Whether a request ended so within ten minutes; the first one begins a series, which has no increase yet."""
    series = _SCOPE.of(metrics.REQUESTS, **labels)
    by = f"sum by ({_OF_SERVER}, rpc, reason)"
    return f"{by} (increase({series}[10m])) > 0\nor\n{by} ({series} unless {series} offset 10m) > 0"


def _off_predictions() -> str:
    """The share of tasks that took more than the largest or less than the least bound of the predicted time."""
    least, *_, largest = metrics.PREDICTION_RATIO.buckets
    seen = _SCOPE.observed(metrics.PREDICTION_RATIO, *TARGET)
    within = _SCOPE.observed(metrics.PREDICTION_RATIO, *TARGET, le=largest)
    below = _SCOPE.observed(metrics.PREDICTION_RATIO, *TARGET, le=least)
    return f"1 - (\n  {within}\n  - {below}\n) / {seen}"
