"""The runbook names what there is: metrics, alerts, settings, files, and sections of its own."""

from __future__ import annotations

import re

import pytest
import yaml
from rig.deployed import DEPLOY, ROOT

from dqkv import errors
from dqkv.metrics import Metrics
from dqkv.settings import table

RUNBOOK = DEPLOY / "README.md"


@pytest.fixture(scope="module")
def text() -> str:
    return RUNBOOK.read_text()


def test_every_metric_is_one(text: str) -> None:
    known = Metrics(version="", torch="", grpcio="").exposition().decode()
    named = set(re.findall(r"\bdqkv_[a-z_]+", text))
    assert named
    assert [name for name in named if not re.search(rf"^# TYPE {name.removesuffix('_total')}", known, re.M)] == []


def test_every_alert_is_one(text: str) -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    known = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    named = set(re.findall(r"\bDqkv[A-Za-z]+", text))
    assert named
    assert named <= known


def test_every_setting_is_one(text: str) -> None:
    named = set(re.findall(r"\bDQKV_[A-Z_]+\b", text))
    assert named
    assert named <= {knob.name for knob in table()}


def test_every_reason_is_one(text: str) -> None:
    named = set(re.findall(r"\b(?:DRAINING|[A-Z]+_(?:FULL|LOST|FINISH|MISMATCH))\b", text))
    assert len(named) >= 4
    assert named <= errors.table().keys()


def test_every_file_and_section_is_there(text: str) -> None:
    files = set(re.findall(r"\b(?:deploy|tests)/[\w./-]*\w", text))
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []
    sections = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.M)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= sections
