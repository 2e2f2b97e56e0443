"""Devices whose start is held up: each process waits before it does anything, for as long as a test wants."""

from __future__ import annotations

import os
from pathlib import Path

WAITING = """
import os, sys, time
while "dqkv.backend.worker" in sys.orig_argv and os.path.exists({gate!r}):
    time.sleep(0.01)
"""


class HeldStarts:
    """Holds up the devices of servers that are started with `python_path` as PYTHONPATH, from `hold` to `let_go`."""

    def __init__(self, folder: Path) -> None:
        self._gate = folder / "held"
        # Python imports a module of this name before it runs anything.
        (folder / "sitecustomize.py").write_text(WAITING.format(gate=str(self._gate)))
        self.python_path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))

    def hold(self) -> None:
        self._gate.touch()

    def let_go(self) -> None:
        self._gate.unlink(missing_ok=True)
