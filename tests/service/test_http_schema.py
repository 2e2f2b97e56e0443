"""The HTTP face against its own description: whatever is asked, the answer is one that the schema promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rig.server import Running


def test_every_answer_is_as_described(server: Running, tmp_path: Path) -> None:
    """Right and wrong methods, parameters, headers and bodies: statuses, types and content as the schema says."""
    url = f"http://127.0.0.1:{server.address['http_port']}/openapi.json"
    operations = sum(len(methods) for methods in json.loads(server.http("/openapi.json")[1])["paths"].values())
    assert operations >= 4
    command = [sys.executable, "-m", "schemathesis.cli", "run", url]
    options = ["--checks=all", "--max-examples=20", "--seed=7", "--no-color", "--request-timeout=120"]
    result = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert f"Tested: {operations}" in result.stdout, result.stdout
