"""Every knob of the server, read once from the environment (DQKV_*) or given by name; the only reader of it."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "DQKV_"
MIB = 1 << 20
GIB = 1 << 30
SHOWN_LIMIT = 80
"""Characters of a wrong value that a message repeats."""


class SettingsInvalid(Exception):
    """A setting is unknown, has a value that means nothing, or does not go with another."""


class Right(StrEnum):
    """What a caller may do: GRADIENT is to send requests and hold regions, ADMIN is also to read the server's API."""

    GRADIENT = "gradient"
    ADMIN = "admin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A bearer token: the name it gives its caller, its right, and the secret (never printed)."""

    name: str
    right: Right
    secret: SecretStr


class Settings(BaseSettings):
    """Every knob, with its unit and default; `Settings.load()` reads the environment. Raises SettingsInvalid there."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    # ---- where it listens
    host: str = Field("127.0.0.1", description="address of both gRPC ports; other than loopback needs TLS")
    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0 takes any free one")
    stream_port: int = Field(50052, ge=0, le=65535, description="port of BackwardStream; 0 takes any free one")
    http_host: str = Field(
        "127.0.0.1",
        description="address of the HTTP port, which has neither TLS nor authentication: "
        "whoever reaches it reads health, metrics and info",
    )
    http_port: int = Field(8080, ge=0, le=65535, description="port of health, metrics and info; 0 takes any free one")
    unix_socket: Path | None = Field(
        None, description="path of a unix socket that also takes gRPC calls (its owner's alone); none by default"
    )
    region_socket: str = Field(
        "auto",
        description="path of the unix socket that takes memfds; auto makes a private folder for it; or none",
    )
    region_socket_mode: str = Field(
        "600",
        pattern="^[0-7]{3}$",
        description="who may use region_socket: 600 its owner, 666 every user of this machine",
    )
    insecure_bind: bool = Field(False, description="allows an address other than loopback without TLS")

    # ---- who may call
    tls_cert: Path | None = Field(None, description="PEM file of the server's certificate chain")
    tls_key: Path | None = Field(None, description="PEM file of the certificate's key")
    tls_client_ca: Path | None = Field(None, description="PEM file of the CAs of callers; they must then have one")
    tokens: SecretStr = Field(
        SecretStr(""), description="bearer tokens, name:right:secret, by comma or line; right is gradient or admin"
    )
    tokens_file: Path | None = Field(None, description="file with further tokens, one a line; # starts a comment")

    # ---- devices
    cpu_devices: int = Field(1, ge=0, le=64, description="CPU devices, one process each")
    cpu_threads: int = Field(0, ge=0, le=1024, description="threads of each CPU device; 0 shares the cores out")
    worker_memory_bytes: int = Field(
        0, ge=0, description="address space of each device process in bytes; 0 sets no limit"
    )

    gpus: str = Field(
        "auto",
        pattern=r"^(auto|none|\d{1,4}(,\d{1,4})*)$",
        description="GPUs, one process each: auto is all that have kernels, or none, or numbers as CUDA counts: 0,1",
    )
    kernels: Path = Field(
        Path("build/kernels"), description="directory of the GPU kernels that `dqkv kernels build` made"
    )
    compile: Literal["never", "on_demand"] = Field(
        "never",
        description="never: kernels are built by `dqkv kernels build` alone; on_demand: also when one is needed",
    )

    # ---- limits
    request_bytes: int = Field(64 * GIB, ge=1, description="largest request, inputs and gradients, in bytes")
    staging_bytes: int = Field(8 * GIB, ge=MIB, description="staging memory of all requests in flight, in bytes")
    staging_idle_s: float = Field(60.0, gt=0, description="seconds after which unused staging memory is given back")
    inline_bytes: int = Field(4 * MIB, ge=0, description="inline bytes above which callers are asked to stream")
    message_bytes: int = Field(64 * MIB, ge=MIB, le=1 * GIB, description="largest unary message in bytes, both ways")
    queue_seconds: float = Field(30.0, gt=0, description="predicted seconds of work that a device's queue takes on")
    default_timeout_s: float = Field(600.0, gt=0, description="deadline in seconds of a call that brings none")
    regions_per_caller: int = Field(64, ge=0, description="regions that one caller may hold")
    lease_default_s: float = Field(60.0, gt=0, description="seconds of a region's lease when the caller names none")
    lease_limit_s: float = Field(3600.0, gt=0, description="longest lease of a region in seconds")
    stream_idle_s: float = Field(10.0, gt=0, description="seconds without a frame after which a stream is ended")
    stream_threads: int = Field(64, ge=1, le=1024, description="streams open at once; others wait for their turn")
    streams_per_caller: int = Field(32, ge=1, le=1024, description="streams that one caller may have open at once")
    unary_messages: int = Field(
        64,
        ge=1,
        le=1024,
        description="unary requests that are read at once, each of message_bytes at most; others wait",
    )
    connection_age_s: float = Field(
        300.0,
        ge=0.1,
        le=86400,
        description="seconds after which a caller's connection is replaced, so that it finds servers that are new",
    )
    drain_s: float = Field(30.0, ge=0, description="seconds that accepted work has to finish after SIGTERM")

    # ---- logs
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto is text on a terminal, else json")

    @classmethod
    def load(cls, **given: Any) -> Settings:
        """The settings of this process: `given` by name, else DQKV_* of the environment, else the defaults.

        Raises SettingsInvalid for an unknown name (naming the nearest known one) or a value that does not fit.
        """
        _refuse_unknown(name for name in os.environ if name.upper().startswith(PREFIX))
        _refuse_unknown(f"{PREFIX}{name.upper()}" for name in given)
        try:
            return cls(**given)
        except ValidationError as error:
            raise SettingsInvalid("; ".join(_sentences(error))) from None

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("DQKV_TLS_CERT and DQKV_TLS_KEY go together: only one was given")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("DQKV_TLS_CLIENT_CA needs DQKV_TLS_CERT and DQKV_TLS_KEY")
        if not is_loopback(self.host) and self.tls_cert is None and not self.insecure_bind:
            raise ValueError(
                f"DQKV_HOST is {self.host}, which is not loopback: give DQKV_TLS_CERT and DQKV_TLS_KEY, "
                "or say DQKV_INSECURE_BIND=true"
            )
        if self.lease_default_s > self.lease_limit_s:
            raise ValueError(
                f"DQKV_LEASE_DEFAULT_S is {self.lease_default_s}, above DQKV_LEASE_LIMIT_S {self.lease_limit_s}"
            )
        fixed = [port for port in (self.port, self.stream_port, self.http_port) if port]
        if len(set(fixed)) != len(fixed):
            raise ValueError(
                f"DQKV_PORT {self.port}, DQKV_STREAM_PORT {self.stream_port} and DQKV_HTTP_PORT {self.http_port} "
                "must differ"
            )
        return self

    @property
    def gpu_indices(self) -> tuple[int, ...] | None:
        """The numbers of the GPUs to use, each once; None is every one that can be used."""
        if self.gpus == "auto":
            return None
        return () if self.gpus == "none" else tuple(dict.fromkeys(int(number) for number in self.gpus.split(",")))

    def read_tokens(self) -> tuple[Token, ...]:
        """The bearer tokens of DQKV_TOKENS and DQKV_TOKENS_FILE. Raises SettingsInvalid; it never repeats a secret."""
        rows = self.tokens.get_secret_value().replace(",", "\n").splitlines()
        if self.tokens_file is not None:
            try:
                rows += read_file(self.tokens_file, "tokens_file").decode().splitlines()
            except UnicodeDecodeError:
                raise SettingsInvalid(f"{PREFIX}TOKENS_FILE is {self.tokens_file}: it is no text in UTF-8") from None
        tokens = tuple(_parse_tokens(rows))
        names = [token.name for token in tokens]
        for name in names:
            if names.count(name) > 1:
                raise SettingsInvalid(f"token {name} is listed twice")
        return tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """One row of the table of settings: its name in the environment, default and meaning."""

    name: str
    default: str
    meaning: str


def table() -> list[Knob]:
    """Every setting, in order, as documentation shows it."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = "" if default is None or isinstance(default, SecretStr) else str(default)
        rows.append(Knob(name=f"{PREFIX}{name.upper()}", default=shown, meaning=field.description or ""))
    return rows


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_file(path: Path, setting: str) -> bytes:
    """The content of the file that a setting names. Raises SettingsInvalid naming the setting."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsInvalid(f"{PREFIX}{setting.upper()} is {path}: {error.strerror}") from None


def _refuse_unknown(names: Iterable[str]) -> None:
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for name in names:
        if name.upper() in known:
            continue
        near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.0)
        raise SettingsInvalid(f"{name} is no setting; the nearest is {near[0]}")


def _sentences(error: ValidationError) -> Iterator[str]:
    for item in error.errors(include_url=False, include_context=False):
        if not item["loc"]:
            yield item["msg"].removeprefix("Value error, ")
            continue
        name = str(item["loc"][0])
        field = Settings.model_fields[name]
        secret = isinstance(field.default, SecretStr)
        shown = "of another type" if secret else _shorten(repr(item["input"]))
        yield f"{PREFIX}{name.upper()} is {shown}, and must be {_must_be(field)}"


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_LIMIT else f"{text[:SHOWN_LIMIT]}..."


def _must_be(field: FieldInfo) -> str:
    """What a setting takes, in words: its kind and its bounds."""
    bound = {
        name: getattr(rule, name)
        for rule in field.metadata
        for name in ("ge", "gt", "le", "pattern")
        if getattr(rule, name, None) is not None
    }
    kind = field.annotation
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if "pattern" in bound:
        return f"of the form {bound['pattern'].strip('^$')}"
    kinds: dict[Any, str] = {int: "a whole number", float: "a finite number", bool: "true or false"}
    words = "a path" if Path in get_args(kind) else kinds.get(kind, "text")
    if "ge" in bound and "le" in bound:
        return f"{words} from {bound['ge']} to {bound['le']}"
    if "ge" in bound:
        return f"{words} of at least {bound['ge']}"
    return f"{words} above {bound['gt']}" if "gt" in bound else words


def _parse_tokens(rows: Iterable[str]) -> Iterator[Token]:
    for number, row in enumerate(rows, 1):
        text = row.strip()
        if not text or text.startswith("#"):
            continue
        name, _, rest = text.partition(":")
        right, _, secret = rest.partition(":")
        if not name or not secret or right not in set(Right):
            raise SettingsInvalid(f"token {number} is not name:right:secret with right gradient or admin")
        yield Token(name=name, right=Right(right), secret=SecretStr(secret))
