"""Every counter, gauge and histogram of the server, declared once; other parts get the methods, not the library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


Kind = TypeVar("Kind", Counter, Gauge, Histogram)


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared(Generic[Kind]):
    """A metric: its kind, the name it is exposed under, what it counts, its labels, and a histogram's bounds."""

    kind: type[Kind]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def make(self, registry: CollectorRegistry) -> Kind:
        """The metric itself, in a registry. Raises ValueError when the registry has it already."""
        bounds: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
        return self.kind(self.name, self.help, self.labels, registry=registry, **bounds)


REQUESTS = Declared(
    kind=Counter,
    name="dqkv_requests_total",
    help="Finished requests",
    labels=("rpc", "code", "reason", "arch", "transport"),
)
REQUEST_SECONDS = Declared(
    kind=Histogram,
    name="dqkv_request_duration_seconds",
    help="From a request's arrival to the end of its answer",
    labels=("rpc", "arch", "transport"),
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
PHASE_SECONDS = Declared(
    kind=Histogram,
    name="dqkv_phase_duration_seconds",
    help="Where an answered request's time went",
    labels=("phase", "device"),
    buckets=(0.0001, 0.00025, 0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1, 2.5, 5),
)
INFLIGHT = Declared(kind=Gauge, name="dqkv_inflight_requests", help="Requests in this server now")
QUEUE_DEPTH = Declared(
    kind=Gauge, name="dqkv_queue_depth", help="Tasks that wait for a device or run on it", labels=("device",)
)
QUEUE_SECONDS = Declared(
    kind=Gauge,
    name="dqkv_queue_predicted_seconds",
    help="Predicted seconds of work that waits or runs",
    labels=("device",),
)
PAIRS = Declared(
    kind=Counter,
    name="dqkv_pairs_total",
    help="Query-key pairs of answered requests, over all heads",
    labels=("arch", "device"),
)
FLOPS = Declared(
    kind=Counter,
    name="dqkv_flops_total",
    help="Floating-point operations of answered requests",
    labels=("arch", "device"),
)
PREDICTION_RATIO = Declared(
    kind=Histogram,
    name="dqkv_cost_prediction_ratio",
    help="Seconds that a device computed over the predicted ones",
    labels=("arch",),
    buckets=(0.25, 0.5, 0.7, 0.85, 1, 1.15, 1.4, 2, 4),
)
TENSOR_BYTES = Declared(
    kind=Counter,
    name="dqkv_bytes_total",
    help="Tensor bytes read (in) and written (out)",
    labels=("direction", "transport"),
)
REGIONS = Declared(kind=Gauge, name="dqkv_regions", help="Registered regions", labels=("kind",))
REGION_BYTES = Declared(kind=Gauge, name="dqkv_region_bytes", help="Bytes of registered regions", labels=("kind",))
REGION_EVENTS = Declared(
    kind=Counter, name="dqkv_region_events_total", help="What happened to regions", labels=("kind", "event")
)
STAGING_BYTES = Declared(kind=Gauge, name="dqkv_staging_pool_bytes", help="Staging memory", labels=("state",))
RECOMPUTED = Declared(
    kind=Counter,
    name="dqkv_lse_recomputed_total",
    help="Answered requests whose softmax_lse was recomputed",
    labels=("arch",),
)
STREAM_ABORTS = Declared(
    kind=Counter,
    name="dqkv_stream_aborts_total",
    help="Streams that ended before their trailer was accepted",
    labels=("cause",),
)
DEVICE_STATE = Declared(
    kind=Gauge, name="dqkv_device_state", help="1 for the state that a device is in", labels=("device", "state")
)
RESTARTS = Declared(
    kind=Counter,
    name="dqkv_worker_restarts_total",
    help="Restarts of device processes",
    labels=("device", "cause"),
)
BUILD_INFO = Declared(kind=Gauge, name="dqkv_build_info", help="Always 1", labels=("version", "torch", "grpcio"))

# Under the names that stock dashboards know.
RPCS_STARTED = Declared(
    kind=Counter,
    name="grpc_server_started_total",
    help="Started RPCs",
    labels=("grpc_type", "grpc_service", "grpc_method"),
)
RPCS_HANDLED = Declared(
    kind=Counter,
    name="grpc_server_handled_total",
    help="Finished RPCs",
    labels=("grpc_type", "grpc_service", "grpc_method", "grpc_code"),
)


def declarations() -> list[Declared[Any]]:
    """Every metric above, in order."""
    return [value for value in globals().values() if isinstance(value, Declared)]


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
        # What every call counts finds its series without the library's checks of labels, which cost more than counting.
        self._requests = cache(REQUESTS.make(registry).labels)
        self._request_s = cache(REQUEST_SECONDS.make(registry).labels)
        self._phase_s = PHASE_SECONDS.make(registry)
        self._inflight = INFLIGHT.make(registry)
        self._queue_depth = QUEUE_DEPTH.make(registry)
        self._queue_s = QUEUE_SECONDS.make(registry)
        self._pairs = PAIRS.make(registry)
        self._flops = FLOPS.make(registry)
        self._prediction = PREDICTION_RATIO.make(registry)
        self._bytes = TENSOR_BYTES.make(registry)
        self._regions = REGIONS.make(registry)
        self._region_bytes = REGION_BYTES.make(registry)
        self._region_events = REGION_EVENTS.make(registry)
        self._staging = STAGING_BYTES.make(registry)
        self._recomputed = RECOMPUTED.make(registry)
        self._aborts = STREAM_ABORTS.make(registry)
        self._device_state = DEVICE_STATE.make(registry)
        self._restarts = RESTARTS.make(registry)
        self._started = cache(RPCS_STARTED.make(registry).labels)
        self._handled = cache(RPCS_HANDLED.make(registry).labels)
        BUILD_INFO.make(registry).labels(version=version, torch=torch, grpcio=grpcio).set(1)

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
        self._requests(served.rpc, served.code, served.reason, served.arch, served.transport).inc()
        self._request_s(served.rpc, served.arch, served.transport).observe(served.duration_s)

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
        self._started(kind, service, method).inc()

    def rpc_handled(self, kind: str, service: str, method: str, code: str) -> None:
        """Counts an RPC that ended, by gRPC's name of its code."""
        self._handled(kind, service, method, code).inc()

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
