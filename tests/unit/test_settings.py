"""Settings: read from DQKV_ names alone, refused where they mean nothing, documented one by one."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

from dqkv.settings import Right, Settings, SettingsInvalid, is_loopback, table


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.upper().startswith("DQKV_")]:
        monkeypatch.delenv(name)


def test_defaults_bind_loopback_and_name_ports_that_differ() -> None:
    settings = Settings.load()
    assert settings.host == "127.0.0.1"
    assert len({settings.port, settings.stream_port, settings.http_port}) == 3
    assert settings.stream_idle_s == 10
    assert settings.inline_bytes == 4 << 20
    assert settings.message_bytes == 64 << 20


def test_the_environment_is_read_and_given_values_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DQKV_PORT", "7001")
    monkeypatch.setenv("DQKV_DRAIN_S", "2.5")
    settings = Settings.load(port=7002)
    assert (settings.port, settings.drain_s) == (7002, 2.5)


def test_an_unknown_name_is_refused_with_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DQKV_STREAM_PROT", "1")
    with pytest.raises(SettingsInvalid, match=r"DQKV_STREAM_PROT.*DQKV_STREAM_PORT"):
        Settings.load()


def test_an_unknown_name_in_lower_case_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("dqkv_prot", "1")
    with pytest.raises(SettingsInvalid, match=r"dqkv_prot.*DQKV_PORT"):
        Settings.load()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": "many"}, "DQKV_PORT"),
        ({"port": 70000}, "DQKV_PORT"),
        ({"port": -1}, "DQKV_PORT"),
        ({"bogus": 1}, "DQKV_BOGUS is no setting; the nearest is DQKV_"),
        ({"portt": 1}, "DQKV_PORTT is no setting; the nearest is DQKV_PORT$"),
        ({"stream_idle_s": 0}, "DQKV_STREAM_IDLE_S"),
        ({"message_bytes": 1}, "DQKV_MESSAGE_BYTES"),
        ({"log_level": "loud"}, "DQKV_LOG_LEVEL"),
        ({"gpus": "all"}, "DQKV_GPUS"),
        ({"gpus": "0,"}, "DQKV_GPUS"),
        ({"gpus": ""}, "DQKV_GPUS"),
        ({"compile": "always"}, "DQKV_COMPILE"),
        ({"host": "0.0.0.0"}, "loopback"),
        ({"host": "::"}, "loopback"),
        ({"host": "a-name"}, "loopback"),
        ({"tls_cert": "c.pem"}, "DQKV_TLS_KEY"),
        ({"tls_key": "k.pem"}, "DQKV_TLS_CERT"),
        ({"tls_client_ca": "ca.pem"}, "DQKV_TLS_CERT"),
        ({"port": 7000, "http_port": 7000}, "must differ"),
        ({"lease_default_s": 10, "lease_limit_s": 5}, "DQKV_LEASE_LIMIT_S"),
        ({"stream_idle_s": "nan"}, "DQKV_STREAM_IDLE_S"),
        ({"drain_s": "inf"}, "DQKV_DRAIN_S"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsInvalid, match=words):
        Settings.load(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"host": "0.0.0.0", "insecure_bind": True},
        {"host": "0.0.0.0", "tls_cert": "c.pem", "tls_key": "k.pem"},
        {"host": "::1"},
        {"host": "localhost"},
        {"host": "127.8.9.10"},
        {"port": 0, "stream_port": 0, "http_port": 0},
    ],
)
def test_what_goes_together_is_taken(given: dict[str, Any]) -> None:
    Settings.load(**given)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("[::1]", True), ("0.0.0.0", False), ("10.0.0.1", False), ("localhost.evil", False)],
)
def test_loopback_is_told_from_the_world(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_every_setting_has_a_row_with_default_and_meaning() -> None:
    rows = table()
    assert [row.name for row in rows] == [f"DQKV_{name.upper()}" for name in Settings.model_fields]
    assert all(row.meaning for row in rows)
    defaults = {row.name: row.default for row in rows}
    assert defaults["DQKV_HOST"] == "127.0.0.1"
    assert defaults["DQKV_TLS_CERT"] == ""
    for row in rows:
        if row.name.endswith("_S"):
            assert "second" in row.meaning or "deadline" in row.meaning, row.name
        if row.name.endswith("_BYTES"):
            assert "bytes" in row.meaning, row.name


def test_tokens_come_from_value_and_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# people\nbob:admin:s3:cret\n\n")
    tokens = Settings.load(tokens="alice:gradient:abc", tokens_file=path).read_tokens()
    assert [(token.name, token.right, token.secret.get_secret_value()) for token in tokens] == [
        ("alice", Right.GRADIENT, "abc"),
        ("bob", Right.ADMIN, "s3:cret"),
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("alice", "token 1"),
        ("alice:gradient:", "token 1"),
        (":gradient:hidden", "token 1"),
        ("alice:gradient:hidden,bob:root:hidden", "token 2"),
        ("alice:gradient:hidden,alice:admin:hidden", "twice"),
    ],
)
def test_a_wrong_token_is_refused_without_its_secret(value: str, words: str) -> None:
    with pytest.raises(SettingsInvalid, match=words) as caught:
        Settings.load(tokens=value).read_tokens()
    assert "hidden" not in str(caught.value)


def test_a_missing_token_file_is_refused_by_the_settings_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="DQKV_TOKENS_FILE"):
        Settings.load(tokens_file=tmp_path / "none").read_tokens()


def wrong_values() -> list[tuple[str, Any, str]]:
    """Of every setting: values of another kind, and beyond each bound, and what the message says it must be."""
    found: list[tuple[str, Any, str]] = []
    for name, field in Settings.model_fields.items():
        found.append((name, [], "must be"))
        if field.annotation in (int, float):
            found += [(name, "many", "number"), (name, "", "number"), (name, "x" * 400, "number")]
        for rule in field.metadata:
            if hasattr(rule, "ge"):
                found.append((name, rule.ge - 1, str(rule.ge)))
            if hasattr(rule, "gt"):
                found.append((name, rule.gt, f"above {rule.gt}"))
            if hasattr(rule, "le"):
                found.append((name, rule.le + 1, str(rule.le)))
            if getattr(rule, "pattern", None):
                found.append((name, "none of it", "of the form"))
        if field.annotation is bool:
            found.append((name, "perhaps", "true or false"))
    return found


@pytest.mark.parametrize(("name", "value", "limit"), wrong_values())
def test_a_wrong_value_is_told_with_its_setting_and_what_it_must_be(name: str, value: Any, limit: str) -> None:
    with pytest.raises(SettingsInvalid) as caught:
        Settings.load(**{name: value})
    words = str(caught.value)
    assert words.startswith(f"DQKV_{name.upper()} is ")
    assert limit in words[words.index("must be") :]
    assert len(words) < 300
    assert "Input should" not in words
    if name != "tokens":
        assert repr(value)[:80] in words


def test_a_wrong_value_of_the_environment_is_told_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DQKV_PORT", "many")
    monkeypatch.setenv("DQKV_LOG_LEVEL", "loud")
    with pytest.raises(SettingsInvalid) as caught:
        Settings.load()
    assert str(caught.value) == (
        "DQKV_PORT is 'many', and must be a whole number from 0 to 65535; "
        "DQKV_LOG_LEVEL is 'loud', and must be one of debug, info, warning, error"
    )


@pytest.mark.parametrize("given", [{"tokens": ["a:admin:hidden"]}, {"token": "a:admin:hidden"}])
def test_no_message_repeats_a_secret(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsInvalid, match="DQKV_TOKENS") as caught:
        Settings.load(**given)
    assert "hidden" not in str(caught.value)
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


def test_a_token_file_that_is_no_text_is_refused_without_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(b"a:admin:hidden\xff")
    with pytest.raises(SettingsInvalid, match="DQKV_TOKENS_FILE") as caught:
        Settings.load(tokens_file=path).read_tokens()
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


def test_http_stays_at_loopback_when_grpc_is_told_to_leave_it() -> None:
    assert Settings.load(host="0.0.0.0", insecure_bind=True).http_host == "127.0.0.1"
    assert Settings.load(http_host="0.0.0.0").host == "127.0.0.1"


def test_secrets_are_not_printed() -> None:
    assert "abc" not in repr(Settings.load(tokens="alice:gradient:abc"))


@pytest.mark.parametrize(("gpus", "indices"), [("auto", None), ("none", ()), ("0", (0,)), ("2,0,2", (2, 0))])
def test_gpus_are_named_once_each(gpus: str, indices: tuple[int, ...] | None) -> None:
    assert Settings.load(gpus=gpus).gpu_indices == indices


def test_kernels_are_looked_for_where_they_are_built() -> None:
    from dqkv.__main__ import KERNELS

    assert Settings.load().kernels == KERNELS
