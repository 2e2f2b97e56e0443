"""A watch rings inside the other side's turn alone, once, and whoever leaves a turn knows whether it did."""

from __future__ import annotations

import threading
import time

from dqkv.server.watchdog import Watch


def test_it_rings_once_and_only_while_the_other_side_has_to_do_something() -> None:
    rings: list[None] = []
    watch = Watch(lambda: rings.append(None), limit_s=5.0)
    watch.look(time.monotonic() + 100)
    assert not watch.rang
    with watch.waiting():
        watch.look(time.monotonic() + 4)
        assert not watch.rang
        watch.look(time.monotonic() + 6)
        watch.look(time.monotonic() + 60)
        assert watch.rang
    assert len(rings) == 1


def test_who_left_a_turn_unrung_is_not_rung_for_it() -> None:
    """A frame that came in time goes to memory that a ring would give back."""
    watch, stop = Watch(lambda: None, limit_s=0.0), threading.Event()

    def look() -> None:
        while not stop.is_set():
            watch.look(time.monotonic())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            with watch.waiting():
                pass
            rang = watch.rang
            time.sleep(0)
            assert watch.rang == rang
            watch.rang = False
    finally:
        stop.set()
        looking.join()
