"""A server that is replaced under load: each request is answered by the old one or the new, and none is lost."""

from __future__ import annotations

import threading
import time
from collections import Counter

from rig.process import wait_for
from rig.server import running
from rig.wire import assert_right, sample

import dqkv

ONE = sample(48, 2, 32)
PATIENT = dqkv.Retry(attempts=500, limit_s=0.5)
CLIENTS = 4


class Load:
    """Clients that ask one after the other, unary and streamed, until they are told to stop."""

    def __init__(self, target: str) -> None:
        self.answered: Counter[int] = Counter()
        self.failed: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(target, number)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _ask(self, target: str, number: int) -> None:
        inline_nbytes = -1 if number % 2 else None
        try:
            with dqkv.Client(target, retry=PATIENT, timeout_s=120, inline_nbytes=inline_nbytes) as client:
                while not self._stop.is_set():
                    answer = client.backward(**ONE.inputs)
                    assert_right(ONE, {role: getattr(answer, role) for role in ONE.gradients})
                    self.answered[number] += 1
        except BaseException as error:  # noqa: BLE001 - the test shows it
            self.failed.append(error)


def test_a_server_replaced_under_load_loses_no_request() -> None:
    with running() as old:
        ports = {"port": str(old.address["grpc_port"]), "stream_port": str(old.address["stream_port"])}
        load = Load(old.target)
        try:
            wait_for(lambda: len(load.answered) == CLIENTS and load.answered.total() > 10 * CLIENTS, "there is load")
            began = time.monotonic()
            assert old.stop() == 0
            stopped_s = time.monotonic() - began
            before = dict(load.answered)
            with running(**ports) as new:
                wait_for(
                    lambda: all(load.answered[number] > before[number] + 2 for number in range(CLIENTS)) or load.failed,
                    "every client is answered by the new server",
                )
                load.stop()
                assert new.metric("dqkv_requests_total", code="OK") > CLIENTS
        finally:
            load.stop()
    assert load.failed == []
    print(f"stopped in {stopped_s:.2f} s; answered before {sum(before.values())}, in all {load.answered.total()}")
