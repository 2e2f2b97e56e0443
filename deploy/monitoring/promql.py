"""PromQL over declared metrics: neither a metric nor a label that the server does not have can be named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from dqkv.metrics import Declared

TARGET = ("job", "instance")
"""Labels that Prometheus adds: what it scrapes, and which of those."""


class Like(str):
    """A value of a label as a regular expression."""

    __slots__ = ()


def series_of(metric: Declared[Any]) -> set[str]:
    """The names under which a metric's series are exposed."""
    parts = ("_bucket", "_count", "_sum") if metric.kind is Histogram else ("",)
    return {f"{metric.name}{part}" for part in parts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Which samples an expression takes: those of targets with these matchers, rates over this window."""

    window: str
    matchers: str = ""

    def of(self, metric: Declared[Counter] | Declared[Gauge], **labels: str) -> str:
        """The metric's series. Raises ValueError for a label that it does not have, as all of these do."""
        return self._series(metric, metric.name, labels)

    def per_second(self, metric: Declared[Counter], *by: str, **labels: str) -> str:
        """A counter's rate, summed by these labels."""
        _check(metric, by)
        return _sum(self._rate(metric, metric.name, labels), by)

    def observed(self, metric: Declared[Histogram], *by: str, le: float | None = None, **labels: str) -> str:
        """How many values a second a histogram sees, of all or of those up to the bound `le`."""
        _check(metric, by)
        if le is None:
            return _sum(self._rate(metric, f"{metric.name}_count", labels), by)
        if le not in metric.buckets:
            raise ValueError(f"{metric.name} has no bound {le}, but {metric.buckets}")
        return _sum(self._rate(metric, f"{metric.name}_bucket", labels, f'le="{float(le)}"'), by)

    def total(self, metric: Declared[Histogram], *by: str, **labels: str) -> str:
        """How much a second the values that a histogram sees add up to."""
        _check(metric, by)
        return _sum(self._rate(metric, f"{metric.name}_sum", labels), by)

    def quantile(self, share: float, metric: Declared[Histogram], *by: str, **labels: str) -> str:
        """The value that this share of a histogram's values stays below, as far as its bounds tell."""
        _check(metric, by)
        buckets = _sum(self._rate(metric, f"{metric.name}_bucket", labels), ("le", *by))
        return f"histogram_quantile({share:g}, {buckets})"

    def _rate(self, metric: Declared[Any], name: str, labels: dict[str, str], extra: str = "") -> str:
        return f"rate({self._series(metric, name, labels, extra)}[{self.window}])"

    def _series(self, metric: Declared[Any], name: str, labels: dict[str, str], extra: str = "") -> str:
        _check(metric, labels)
        own = [f'{label}{"=~" if isinstance(want, Like) else "="}"{want}"' for label, want in labels.items()]
        matchers = ", ".join(part for part in (self.matchers, *own, extra) if part)
        return f"{name}{{{matchers}}}" if matchers else name


def _sum(rate: str, by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)}) ({rate})" if by else f"sum({rate})"


def _check(metric: Declared[Any], labels: tuple[str, ...] | dict[str, str]) -> None:
    for label in labels:
        if label not in (*metric.labels, *TARGET):
            raise ValueError(f"{metric.name} has no label {label}, but {', '.join(metric.labels) or 'none'}")
