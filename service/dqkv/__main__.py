"""The command line: serve, demo, check and bench."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(name="dqkv", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command that the process was called with."""
    app()


@app.command()
def serve(
    given: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="a setting, before the environment's")
    ] = None,
) -> None:
    """Serve gradients until SIGTERM or SIGINT. `dqkv settings` lists what can be set."""
    from dqkv.server.app import run
    from dqkv.settings import Settings, SettingsInvalid

    try:
        loaded = Settings.load(**_pairs(given or []))
    except SettingsInvalid as error:
        typer.echo(f"cannot start: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(run(loaded))


@app.command()
def settings() -> None:
    """List what can be set: the name in the environment, its default, and what it means."""
    from rich.console import Console
    from rich.table import Table

    from dqkv.settings import table

    rows = Table("name", "default", "meaning")
    for knob in table():
        rows.add_row(knob.name, knob.default, knob.meaning)
    Console().print(rows)


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
