"""The tree of errors: one class a reason, one table of them all, and the same error at both ends of the wire."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import grpc
import pytest

import dqkv
from dqkv import codec, errors

pytestmark = pytest.mark.numpy_only

SOURCE = Path(dqkv.__file__).parent
MADE_BY_THE_CLIENT = {"TRANSPORT"}
ROOT = {"UNKNOWN"}


def classes() -> list[type[errors.DqkvError]]:
    """The root and everything below it."""
    found, todo = [], [errors.DqkvError]
    while todo:
        found.append(kind := todo.pop())
        todo += kind.__subclasses__()
    return found


def test_each_reason_belongs_to_one_class_and_is_in_the_table() -> None:
    reasons = Counter(kind.reason for kind in classes())
    assert [reason for reason, count in reasons.items() if count > 1] == []
    assert errors.table() == {kind.reason: kind for kind in classes()}
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]+", reason) for reason in reasons)


def test_reasons_are_written_down_in_the_table_s_module_alone() -> None:
    """Elsewhere they are looked up from the class: a second spelling could say something else one day."""
    reasons = "|".join(set(errors.table()) - ROOT)
    spelled = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        if path.name != "errors.py" and "v1" not in path.parts
        for line in path.read_text().splitlines()
        if re.search(rf'["\']({reasons})["\']', line)
    ]
    # gRPC's own names of codes are spelled as some reasons are.
    assert [line for line in spelled if "StatusCode" not in line] == []


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.reason)
def test_a_status_is_grpc_s_own_by_name_and_number(kind: type[errors.DqkvError]) -> None:
    assert grpc.StatusCode[kind.status.grpc_name].value[0] == kind.status.grpc_code
    assert 400 <= kind.status.http < 600
    assert kind.__doc__


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.reason)
def test_an_error_arrives_as_what_it_was_sent_as(kind: type[errors.DqkvError]) -> None:
    sent = kind("words for people", field="q", retry_after_s=0.25)
    status = codec.encode_error(sent)
    got = codec.decode_error(status, grpc.StatusCode[kind.status.grpc_name], status.message)
    assert type(got) is kind
    assert (got.message, got.field, got.retry_after_s) == ("words for people", "q", 0.25)


def test_a_reason_of_a_newer_server_is_still_an_error_of_ours() -> None:
    got = errors.from_reason("NOT_YET_INVENTED", "words")
    assert type(got) is errors.DqkvError
    assert got.message == "words"
