"""The HTTP face: probes, metrics and facts, quick whatever the devices do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rig.pace import steady_s
from rig.server import Running, eventually
from rig.wire import endless, frames_of, sample, stream, streamed_gradients, unary_request

from dqkv.v1 import gradient_pb2 as pb
from dqkv.v1 import gradient_pb2_grpc as stubs

PROBE_S = 0.1
LABELS = {"rpc", "code", "reason", "arch", "transport", "phase", "device", "direction", "kind", "event", "state"}
LABELS |= {"cause", "version", "torch", "grpcio", "le", "grpc_type", "grpc_service", "grpc_method", "grpc_code"}


def test_probes_answer_json(server: Running) -> None:
    assert json.loads(server.http("/livez")[1]) == {"status": "live"}
    status, body = server.http("/readyz")
    assert (status, json.loads(body)) == (200, {"ready": True, "failing": []})


def test_info_tells_ports_devices_and_limits(server: Running) -> None:
    info = json.loads(server.http("/v1/info")[1])
    assert (info["grpc_port"], info["stream_port"]) == (server.address["grpc_port"], server.address["stream_port"])
    assert [(device["name"], device["state"], device["archs"]) for device in info["devices"]] == [
        ("cpu:0", "ok", ["cpu"])
    ]
    assert info["limits"]["message_bytes"] == 64 << 20
    assert any("GPU" in note for note in info["notes"])


def test_limits_are_the_same_over_http_and_grpc(server: Running, channel: grpc.Channel) -> None:
    told = json.loads(server.http("/v1/info")[1])["limits"]
    limits = stubs.CapabilityServiceStub(channel).GetCapabilities(pb.GetCapabilitiesRequest(), timeout=120).limits
    fields = {field.name: getattr(limits, field.name) for field in pb.Limits.DESCRIPTOR.fields}
    assert fields == {name: told[name] for name in fields}
    assert all(fields.values())


def test_the_api_describes_itself(server: Running) -> None:
    assert server.http("/docs")[0] == 200
    paths = json.loads(server.http("/openapi.json")[1])["paths"]
    assert set(paths) == {"/livez", "/readyz", "/metrics", "/v1/info"}


def test_the_page_of_documentation_needs_no_other_host(server: Running) -> None:
    page = server.http("/docs")[1].decode()
    links = re.findall(r"""(?:src|href)=["']([^"']+)["']""", page)
    links += re.findall(r"""\burl: ["']([^"']+)["']""", page)
    assert len(links) == 4, links
    for link in links:
        assert link.startswith("/")
        assert not link.startswith("//")
        status, body = server.http(link)
        assert (status, bool(body)) == (200, True), link
    assert '"validatorUrl": null' in page, "the script asks another host otherwise"
    elsewhere = set(re.findall(r"https?://[^/\"'\s]+|(?<![:\w])//[\w.]+\.\w+", page))
    assert elsewhere == set()


@pytest.mark.parametrize("path", ["/", "/v1/none", "/metrics/../x", "/livez?x=1"])
def test_other_paths_are_not_found_or_ignored(server: Running, path: str) -> None:
    assert server.http(path)[0] == (200 if path.startswith("/livez") else 404)


def test_a_request_moves_each_metric_it_should(channel: grpc.Channel, bulk: grpc.Channel, server: Running) -> None:
    one = sample()
    before = {name: server.metric(name, **labels) for name, labels in _MOVED.items()}
    stubs.AttentionGradientServiceStub(channel).Backward(unary_request(one), timeout=120)
    streamed_gradients(one, stream(bulk, frames_of(one)))
    eventually(server.is_quiet)
    after = {name: server.metric(name, **labels) for name, labels in _MOVED.items()}
    moved = {name: after[name] - before[name] for name in _MOVED}
    assert moved["dqkv_requests_total"] == 2
    assert moved["dqkv_request_duration_seconds_count"] == 2
    assert moved["dqkv_pairs_total"] == 2 * 16 * 16 * 2
    assert moved["dqkv_flops_total"] > 0
    assert moved["dqkv_bytes_total"] == 2 * one.nbytes
    assert moved["dqkv_phase_duration_seconds_count"] == 2
    assert moved["dqkv_lse_recomputed_total"] == 2
    assert moved["dqkv_cost_prediction_ratio_count"] == 2
    assert moved["grpc_server_started_total"] == 2
    assert moved["grpc_server_handled_total"] == 2
    assert server.metric("dqkv_device_state", device="cpu:0", state="ok") == 1
    assert server.metric("dqkv_device_state", device="cpu:0", state="lost") == 0
    assert server.metric("dqkv_build_info") == 1


_MOVED: dict[str, dict[str, str]] = {
    "dqkv_requests_total": {"code": "OK", "arch": "cpu"},
    "dqkv_request_duration_seconds_count": {"arch": "cpu"},
    "dqkv_pairs_total": {},
    "dqkv_flops_total": {},
    "dqkv_bytes_total": {"direction": "in"},
    "dqkv_phase_duration_seconds_count": {"phase": "compute"},
    "dqkv_lse_recomputed_total": {},
    "dqkv_cost_prediction_ratio_count": {},
    "grpc_server_started_total": {"grpc_service": "dqkv.v1.AttentionGradientService"},
    "grpc_server_handled_total": {"grpc_service": "dqkv.v1.AttentionGradientService", "grpc_code": "OK"},
}


def test_metrics_follow_prometheus_rules_and_have_no_open_labels(channel: grpc.Channel, server: Running) -> None:
    stubs.AttentionGradientServiceStub(channel).Backward(unary_request(sample()), timeout=120)
    text = server.http("/metrics")[1].decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert re.fullmatch(r"(dqkv|grpc_server)_[a-z_]+", family.name), family.name
        assert family.documentation
        assert not family.name.endswith(("_ms", "_mib"))
        for one in family.samples:
            assert set(one.labels) <= LABELS, one
            assert not any("127.0.0.1" in value or "dqkv-" in value for value in one.labels.values())
            if family.type == "counter":
                assert one.name.endswith("_total")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_complain_about(server: Running) -> None:
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=server.http("/metrics")[1], capture_output=True, timeout=120
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


def test_probes_answer_in_time_while_the_device_is_busy(channel: grpc.Channel, server: Running) -> None:
    heavy = unary_request(endless(), checksum=False)
    calls = [stubs.AttentionGradientServiceStub(channel).Backward.future(heavy, timeout=36000) for _ in range(3)]
    try:
        eventually(lambda: server.metric("dqkv_queue_depth") == len(calls))
        for path in ("/livez", "/readyz", "/metrics"):
            assert server.http(path)[0] == 200
            assert steady_s(lambda path=path: server.http(path), below_s=PROBE_S) < PROBE_S, path
    finally:
        for call in calls:
            call.cancel()
    eventually(lambda: server.metric("dqkv_inflight_requests") == 0)


def test_many_probes_at_once_are_all_answered(server: Running) -> None:
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(server.http("/readyz")[0])) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert statuses == [200] * 40
