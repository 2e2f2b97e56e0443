"""The command line: serve, ray, demo, check, bench and kernels."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dqkv.client.endpoint import Tls
    from dqkv.courier import Door

app = typer.Typer(name="dqkv", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
kernels = typer.Typer(no_args_is_help=True, help="Build GPU kernels ahead of time, list and verify them.")
app.add_typer(kernels, name="kernels")

SERVER_MODULES = (
    "fastapi",
    "fastapi_offline",
    "grpc_health",
    "grpc_reflection",
    "msgspec",
    "prometheus_client",
    "pydantic",
    "pydantic_settings",
    "structlog",
    "torch",
    "uvicorn",
)
"""What the extra named server brings."""

Address = Annotated[str, typer.Argument(help="host:port of the server's gRPC port, or unix:/path")]
RootCa = Annotated[Path | None, typer.Option(help="PEM file of the CA to trust; any of these four turns TLS on")]
Certificate = Annotated[Path | None, typer.Option(help="PEM file of our own certificate, for mutual TLS")]
Key = Annotated[Path | None, typer.Option(help="PEM file of the certificate's key")]
ServerName = Annotated[str | None, typer.Option(help="name in the server's certificate, if it is not the host")]
TokenFile = Annotated[Path | None, typer.Option(help="file that holds a bearer token")]


KernelDirectory = Annotated[Path, typer.Option("--out", help="directory of the built kernels")]
KERNELS = Path("build") / "kernels"


def main() -> None:
    """Runs the command that the process was called with."""
    app()


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dqkv {metadata.version('dqkv')}")
        raise typer.Exit


@app.callback()
def dqkv(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The exact gradients of attention, from a server: dQ, dK and dV."""


@app.command()
def serve(
    given: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="a setting, before the environment's")
    ] = None,
) -> None:
    """Serve gradients until SIGTERM or SIGINT. `dqkv settings` lists what can be set."""
    _need_server_extra("serve")
    from dqkv.server.app import run
    from dqkv.settings import Settings, SettingsInvalid

    try:
        loaded = Settings.load(**_pairs(given or []))
    except SettingsInvalid as error:
        typer.echo(f"cannot start: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(run(loaded))


@app.command()
def ray(
    workers: Annotated[int, typer.Option(min=1, help="workers in the cluster, each with one device")],
    address: Annotated[str, typer.Option(help="host:port of the head, or auto on a node of the cluster")] = "auto",
    cpus: Annotated[int, typer.Option(min=1, help="cores of a worker, and its threads")] = 1,
    gpus: Annotated[int, typer.Option(min=0, max=1, help="1: each worker has a GPU of its own; 0: the CPU")] = 0,
    given: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="a setting of the front")
    ] = None,
) -> None:
    """Serve gradients from workers in a Ray cluster, through this process, until SIGTERM or SIGINT."""
    _need_server_extra("ray")
    if util.find_spec("ray") is None:
        typer.echo("dqkv ray needs pip install 'dqkv[server,ray]'", err=True)
        raise typer.Exit(1)
    from dqkv.cluster.actors import Plan, run
    from dqkv.settings import Settings, SettingsInvalid

    try:
        loaded = Settings.load(**_pairs(given or []) | {"cpu_devices": "0", "gpus": "none"})
    except SettingsInvalid as error:
        typer.echo(f"cannot start: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(run(loaded, Plan(address=address, workers=workers, cpus=cpus, gpus=gpus)))


@kernels.command("build")
def build_kernels(
    out: KernelDirectory = KERNELS,
    arch: Annotated[str, typer.Option(help="families of kernels, comma-separated")] = "80,90",
    target: Annotated[
        str, typer.Option(help="targets of the compiler, comma-separated; those an arch is not made for are left out")
    ] = "sm_80,sm_90a,sm_100a",
    which: Annotated[
        str, typer.Option("--set", help="which kernels: default, all that any valid request can need")
    ] = "default",
    key: Annotated[list[str] | None, typer.Option(help="the name of one kernel, instead of arch and target")] = None,
    processes: Annotated[int, typer.Option(min=1, help="compilers at a time")] = 2,
) -> None:
    """Build what is missing of the kernels that any valid request can need; needs the compile extra, but no GPU."""
    from dqkv.cli.kernels import run_build

    if which != "default":
        typer.echo(f"--set has {which!r}, must be default", err=True)
        raise typer.Exit(1)
    raise typer.Exit(run_build(arch, target, key or [], out, processes))


@kernels.command("list")
def list_kernels(out: KernelDirectory = KERNELS) -> None:
    """Print every kernel and whether it is built."""
    from dqkv.cli.kernels import run_list

    raise typer.Exit(run_list(out))


@kernels.command("verify")
def verify_kernels(out: KernelDirectory = KERNELS) -> None:
    """Check that the built kernels are whole and of this source; exit code 0 when they are."""
    from dqkv.cli.kernels import run_verify

    raise typer.Exit(run_verify(out))


@kernels.command("selftest")
def selftest_kernels(
    arch: Annotated[int, typer.Option(help="family of kernels")],
    out: KernelDirectory = KERNELS,
    timeout_s: Annotated[float, typer.Option(min=1, help="longest time for one GPU")] = 900.0,
) -> None:
    """Hold a family of kernels against the oracle on every GPU here that could run it; exit code 0 when all is right.

    A family that has not run on such a device before is not used, and the server is not ready, until this has passed
    once on the GPU; the outcome is kept beside the kernels.
    """
    _need_server_extra("kernels selftest")
    from dqkv.cli.selftest import run_selftest

    raise typer.Exit(run_selftest(arch, out, timeout_s))


@app.command()
def demo() -> None:
    """Start a server here, send it three requests, and show their errors and where the time went."""
    _need_server_extra("demo")
    from dqkv.cli.demo import run

    raise typer.Exit(run())


@app.command()
def check(
    address: Address,
    root_ca: RootCa = None,
    certificate: Certificate = None,
    key: Key = None,
    server_name: ServerName = None,
    token_file: TokenFile = None,
) -> None:
    """Send problems with known gradients to a running server by every transport; exit code 0 when all are right."""
    from dqkv.cli.check import run

    raise typer.Exit(run(_door(address, _tls(root_ca, certificate, key, server_name), token_file)))


@app.command()
def bench(
    address: Address,
    root_ca: RootCa = None,
    certificate: Certificate = None,
    key: Key = None,
    server_name: ServerName = None,
    token_file: TokenFile = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    seconds: Annotated[float, typer.Option(min=0.1, help="longest time for a row of the table")] = 2.0,
) -> None:
    """Time a running server: problems of several sizes by every transport."""
    from dqkv import errors
    from dqkv.cli.bench import run
    from dqkv.client.arrays import dtype_of

    try:
        kind = dtype_of("dtype", dtype)
    except errors.DTypeMismatch as error:
        raise typer.BadParameter(error.message, param_hint="--dtype") from None
    door = _door(address, _tls(root_ca, certificate, key, server_name), token_file)
    raise typer.Exit(run(door, dtype=kind, seconds=seconds))


@app.command()
def settings() -> None:
    """List what can be set: the name in the environment, its default, and what it means."""
    _need_server_extra("settings")
    from rich.console import Console
    from rich.table import Table

    from dqkv.settings import table

    rows = Table("name", "default", "meaning")
    for knob in table():
        rows.add_row(knob.name, knob.default, knob.meaning)
    Console().print(rows)


def _need_server_extra(command: str) -> None:
    if any(util.find_spec(name) is None for name in SERVER_MODULES):
        typer.echo(f"dqkv {command} needs pip install 'dqkv[server]'", err=True)
        raise typer.Exit(1)


def _tls(root_ca: Path | None, certificate: Path | None, key: Path | None, server_name: str | None) -> Tls | None:
    from dqkv import errors
    from dqkv.client.endpoint import Tls

    if root_ca is None and certificate is None and key is None and server_name is None:
        return None
    try:
        return Tls(root_ca=root_ca, certificate=certificate, key=key, server_name=server_name)
    except errors.OptionInvalid as error:
        raise typer.BadParameter(error.message) from None


def _door(address: str, tls: Tls | None, token_file: Path | None) -> Door:
    from dqkv import errors
    from dqkv.client.endpoint import Endpoint
    from dqkv.courier import Door

    try:
        token = None if token_file is None else token_file.read_text().strip()
    except OSError as error:
        raise typer.BadParameter(f"{token_file}: {error.strerror}", param_hint="--token-file") from None
    try:
        Endpoint(address=address, tls=tls, token=token)
    except errors.OptionInvalid as error:
        raise typer.BadParameter(error.message) from None
    return Door(address=address, tls=tls, token=token)


def _pairs(settings: list[str]) -> dict[str, str]:
    pairs = {}
    for item in settings:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{item!r} is not NAME=VALUE", param_hint="--set")
        pairs[name.strip().lower().removeprefix("dqkv_")] = value
    return pairs


if __name__ == "__main__":
    main()
