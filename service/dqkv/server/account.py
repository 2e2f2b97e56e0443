"""What an answered request adds to the metrics, and what a log says of its sizes and times."""

from __future__ import annotations

from typing import Any

from dqkv.metrics import Metrics
from dqkv.problem import Report
from dqkv.server.gradient import Job, Order


def count(metrics: Metrics, transport: str, job: Job, report: Report) -> None:
    """Counts an answered request's work, the bytes of its tensors by the way they went, and the phases it reports."""
    order, estimate = job.order, job.estimate
    metrics.computed(
        arch=report.arch,
        device=report.device,
        pairs=estimate.pairs,
        flops=estimate.flops,
        recomputed=report.softmax_lse_recomputed,
    )
    sent = sum(tensor.nbytes for tensor in order.answered.values())
    written = sum(tensor.nbytes for tensor in order.outputs.values())
    for direction, way, nbytes in (
        ("in", transport, order.inline_nbytes + order.streamed_nbytes),
        ("in", "region", order.region_nbytes),
        ("out", transport, sent),
        ("out", "region", written),
    ):
        if nbytes:
            metrics.moved(direction, way, nbytes)
    for phase, duration_s in (
        ("queue", report.queued_s),
        ("transfer", report.transfer_s),
        ("compute", report.device_s),
    ):
        metrics.phase(phase, report.device, duration_s)


def sizes(order: Order) -> dict[str, Any]:
    """The sizes of a request for its log line; bytes, rows and heads."""
    shape = order.problem.shape
    return {
        "inline_nbytes": order.inline_nbytes,
        "streamed_nbytes": order.streamed_nbytes,
        "region_nbytes": order.region_nbytes,
        "batch_size": shape.batch_size,
        "rows_q": shape.rows_q,
        "rows_k": shape.rows_k,
        "num_heads_q": shape.num_heads_q,
        "num_heads_kv": shape.num_heads_kv,
        "head_dim": shape.head_dim,
        "dtype": order.problem.dtype.value,
    }


def times(report: Report) -> dict[str, Any]:
    """Where it ran and its times for its log line; seconds."""
    return {
        "device": report.device,
        "queued_s": round(report.queued_s, 6),
        "transfer_s": round(report.transfer_s, 6),
        "device_s": round(report.device_s, 6),
        "total_s": round(report.total_s, 6),
    }
