"""`dqkv check`: sends problems with known gradients to a running server and prints a verdict."""

from __future__ import annotations

import math
from collections import Counter

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dqkv import errors
from dqkv.check import Outcome, Verdict, check
from dqkv.courier import Courier, Door
from dqkv.trials import TRIALS

COLOURS = {Outcome.RIGHT: "green", Outcome.WRONG: "bold red", Outcome.FAILED: "bold red", Outcome.SKIPPED: "yellow"}

WIDE = 120
"""Columns of a terminal on which a row also says what it shows."""

NAMED = 3
"""Problems that are named where several went wrong in the same way."""


def run(door: Door) -> int:
    """Prints a row for each problem and transport, and a sentence; 0 when every answer was right, else 1."""
    console = Console()
    try:
        with Courier(door) as courier:
            devices = courier.client.capabilities().devices
            console.print(
                f"{door.address}: {', '.join(f'{device.name} ({device.state})' for device in devices)}", markup=False
            )
            verdicts = list(check(courier, TRIALS))
    except errors.DqkvError as error:
        console.print(
            f"{door.address} cannot be asked: {error.reason}: {error.message}", style="bold red", markup=False
        )
        return 1
    console.print(_table(verdicts, explain=console.width >= WIDE))
    _explain(console, verdicts)
    return _sum_up(console, verdicts)


def _table(verdicts: list[Verdict], *, explain: bool) -> Table:
    title = "error as a part of its budget: right up to 1.00"
    table = Table("problem", *(["what it shows"] if explain else []), "by", title=title, box=box.SIMPLE)
    for name in ("dq", "dk", "dv", "dsink", "ms"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for verdict in verdicts:
        ratios = (_ratio(verdict.ratios.get(role)) for role in ("dq", "dk", "dv", "dsink"))
        answered = f"{verdict.round_trip_s * 1e3:.1f}" if verdict.ratios else ""
        table.add_row(
            verdict.trial.name,
            *([verdict.trial.shows] if explain else []),
            str(verdict.transport),
            *ratios,
            answered,
            Text(str(verdict.outcome), style=COLOURS[verdict.outcome]),
        )
    return table


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return "not finite" if math.isnan(ratio) else f"{ratio:.2f}"


def _explain(console: Console, verdicts: list[Verdict]) -> None:
    """One line for each thing that was not right, with the problems and transports it was said of."""
    said: dict[tuple[Outcome, str], list[str]] = {}
    for verdict in verdicts:
        if verdict.outcome is not Outcome.RIGHT:
            where = said.setdefault((verdict.outcome, verdict.says), [])
            where.append(f"{verdict.trial.name} by {verdict.transport}")
    for (outcome, says), where in said.items():
        more = f" and {len(where) - NAMED} more" if len(where) > NAMED else ""
        line = f"{outcome}: {', '.join(where[:NAMED])}{more}: {says}"
        console.print(Text(line, style=COLOURS[outcome]))


def _sum_up(console: Console, verdicts: list[Verdict]) -> int:
    counts = Counter(verdict.outcome for verdict in verdicts)
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])
    if any(verdict.is_bad for verdict in verdicts) or not counts[Outcome.RIGHT]:
        console.print(f"Do not use this server: {said}.", style="bold red")
        return 1
    console.print(f"Every answer was right: {said}.", style="green")
    return 0
