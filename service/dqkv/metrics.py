"""Every counter, gauge and histogram of the server, declared once; other parts get the methods, not the library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_REQUEST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_PHASE_S = (0.0001, 0.00025, 0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1, 2.5, 5)
_RATIO = (0.25, 0.5, 0.7, 0.85, 1, 1.15, 1.4, 2, 4)

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One finished request as it is counted: rpc ("Backward"), transport, code (gRPC's name), reason, arch, seconds.

    reason is "" for an answer; arch is "" where none was chosen.
    """

    rpc: str
    transport: str
    code: str
    reason: str
    arch: str
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGauge:
    """What is known of a device at this moment: state name, tasks waiting or running, and predicted seconds of work."""

    device: str
    state: str
    depth: int
    queue_s: float


class Metrics:
    """The metrics of one server, in a registry of its own. Safe to use from any thread."""

    def __init__(self, *, version: str, torch: str, grpcio: str) -> None:
        # When each series began is a series more for each; nobody here asks for it.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "dqkv_requests",
            "Finished requests",
            ["rpc", "code", "reason", "arch", "transport"],
            registry=registry,
        )
        self._request_s = Histogram(
            "dqkv_request_duration_seconds",
            "From a request's arrival to the end of its answer",
            ["rpc", "arch", "transport"],
            buckets=_REQUEST_S,
            registry=registry,
        )
        self._phase_s = Histogram(
            "dqkv_phase_duration_seconds",
            "Where an answered request's time went",
            ["phase", "device"],
            buckets=_PHASE_S,
            registry=registry,
        )
        self._inflight = Gauge("dqkv_inflight_requests", "Requests in this server now", registry=registry)
        self._queue_depth = Gauge(
            "dqkv_queue_depth", "Tasks that wait for a device or run on it", ["device"], registry=registry
        )
        self._queue_s = Gauge(
            "dqkv_queue_predicted_seconds",
            "Predicted seconds of work that waits or runs",
            ["device"],
            registry=registry,
        )
        self._pairs = Counter(
            "dqkv_pairs", "Query-key pairs of answered requests, over all heads", ["arch", "device"], registry=registry
        )
        self._flops = Counter(
            "dqkv_flops", "Floating-point operations of answered requests", ["arch", "device"], registry=registry
        )
        self._prediction = Histogram(
            "dqkv_cost_prediction_ratio",
            "Seconds that a device computed over the predicted ones",
            ["arch"],
            buckets=_RATIO,
            registry=registry,
        )
        self._bytes = Counter(
            "dqkv_bytes", "Tensor bytes read (in) and written (out)", ["direction", "transport"], registry=registry
        )
        self._regions = Gauge("dqkv_regions", "Registered regions", ["kind"], registry=registry)
        self._region_bytes = Gauge("dqkv_region_bytes", "Bytes of registered regions", ["kind"], registry=registry)
        self._region_events = Counter(
            "dqkv_region_events", "What happened to regions", ["kind", "event"], registry=registry
        )
        self._staging = Gauge("dqkv_staging_pool_bytes", "Staging memory", ["state"], registry=registry)
        self._recomputed = Counter(
            "dqkv_lse_recomputed", "Answered requests whose softmax_lse was recomputed", ["arch"], registry=registry
        )
        self._aborts = Counter(
            "dqkv_stream_aborts", "Streams that ended before their trailer was accepted", ["cause"], registry=registry
        )
        self._device_state = Gauge(
            "dqkv_device_state", "1 for the state that a device is in", ["device", "state"], registry=registry
        )
        self._restarts = Counter(
            "dqkv_worker_restarts", "Restarts of device processes", ["device", "cause"], registry=registry
        )
        self._started = Counter(
            "grpc_server_started", "Started RPCs", ["grpc_type", "grpc_service", "grpc_method"], registry=registry
        )
        self._handled = Counter(
            "grpc_server_handled",
            "Finished RPCs",
            ["grpc_type", "grpc_service", "grpc_method", "grpc_code"],
            registry=registry,
        )
        build = Gauge("dqkv_build_info", "Always 1", ["version", "torch", "grpcio"], registry=registry)
        build.labels(version=version, torch=torch, grpcio=grpcio).set(1)

    # ---- requests
    @contextmanager
    def inflight(self) -> Iterator[None]:
        """Counts a request as in this server while the block runs."""
        self._inflight.inc()
        try:
            yield
        finally:
            self._inflight.dec()

    def served(self, served: Served) -> None:
        """Counts a finished request."""
        self._requests.labels(served.rpc, served.code, served.reason, served.arch, served.transport).inc()
        self._request_s.labels(served.rpc, served.arch, served.transport).observe(served.duration_s)

    def phase(self, phase: str, device: str, duration_s: float) -> None:
        """Seconds that one phase of an answered request took."""
        self._phase_s.labels(phase, device).observe(duration_s)

    def computed(self, *, arch: str, device: str, pairs: int, flops: float, recomputed: bool) -> None:
        """Counts what a device computed for an answered request."""
        self._pairs.labels(arch, device).inc(pairs)
        self._flops.labels(arch, device).inc(flops)
        if recomputed:
            self._recomputed.labels(arch).inc()

    def prediction(self, arch: str, ratio: float) -> None:
        """Seconds that a device computed over the seconds that were predicted."""
        self._prediction.labels(arch).observe(ratio)

    def moved(self, direction: str, transport: str, nbytes: int) -> None:
        """Counts tensor bytes: direction in or out, transport unary, stream or region."""
        self._bytes.labels(direction, transport).inc(nbytes)

    def stream_aborted(self, cause: str) -> None:
        """Counts a stream that ended before its trailer was accepted."""
        self._aborts.labels(cause).inc()

    # ---- RPCs, under the names that stock dashboards know
    def rpc_started(self, kind: str, service: str, method: str) -> None:
        """Counts an RPC that began."""
        self._started.labels(kind, service, method).inc()

    def rpc_handled(self, kind: str, service: str, method: str, code: str) -> None:
        """Counts an RPC that ended, by gRPC's name of its code."""
        self._handled.labels(kind, service, method, code).inc()

    # ---- regions and devices
    def region_event(self, kind: str, event: str) -> None:
        """Counts what happened to a region of a kind."""
        self._region_events.labels(kind, event).inc()

    def worker_restarted(self, device: str, cause: str) -> None:
        """Counts the restart of a device's process."""
        self._restarts.labels(device, cause).inc()

    # ---- what is read when somebody asks
    def set_devices(self, devices: Sequence[DeviceGauge], states: Sequence[str]) -> None:
        """Sets the gauges of every device; `states` are all that a device may be in."""
        for gauge in devices:
            self._queue_depth.labels(gauge.device).set(gauge.depth)
            self._queue_s.labels(gauge.device).set(gauge.queue_s)
            for state in states:
                self._device_state.labels(gauge.device, state).set(state == gauge.state)

    def set_staging(self, *, used_nbytes: int, total_nbytes: int) -> None:
        """Sets the gauges of staging memory."""
        self._staging.labels("used").set(used_nbytes)
        self._staging.labels("total").set(total_nbytes)

    def set_regions(self, kind: str, *, count: int, nbytes: int) -> None:
        """Sets the gauges of one kind of region."""
        self._regions.labels(kind).set(count)
        self._region_bytes.labels(kind).set(nbytes)

    def exposition(self) -> bytes:
        """Everything, in the text format of Prometheus."""
        return prometheus_client.generate_latest(self._registry)
