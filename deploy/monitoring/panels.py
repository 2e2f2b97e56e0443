"""The kinds of panel that the dashboard is made of, each with one look for all of its panels."""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as queries

SOURCE = looks.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
"""Columns of a dashboard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """An expression, and how each series that it gives is called."""

    expr: str
    legend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a panel says of itself: its title, what it means, its unit (as Grafana names units), columns and rows."""

    title: str
    meaning: str
    unit: str
    columns: int
    rows: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A value from which on a colour holds."""

    at: float
    color: str


def number(about: About, expr: str, *steps: Step, calm: str = "green") -> stat.Panel:
    """One large number, as it is now, coloured by the last step it reached and `calm` below the first."""
    return (
        stat.Panel()
        .title(about.title)
        .description(about.meaning)
        .datasource(SOURCE)
        .span(about.columns)
        .height(about.rows)
        .unit(about.unit)
        .no_value("none")
        .thresholds(_thresholds(steps, calm))
        .color_scheme(boards.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .color_mode(looks.BigValueColorMode.VALUE)
        .graph_mode(looks.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_query(Line(expr=expr, legend=about.title), "A"))
    )


def lines(about: About, *shown: Line, limit: Step | None = None, stacked: bool = False) -> timeseries.Panel:
    """Values over time, from zero, the legend with mean and largest; a dashed line and its area mark a limit."""
    panel = (
        timeseries.Panel()
        .title(about.title)
        .description(about.meaning)
        .datasource(SOURCE)
        .span(about.columns)
        .height(about.rows)
        .unit(about.unit)
        .min(0)
        .line_width(1)
        .fill_opacity(40 if stacked else 8)
        .show_points(looks.VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING))
        .legend(
            common.VizLegendOptions()
            .display_mode(looks.LegendDisplayMode.TABLE)
            .placement(looks.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["mean", "max"])
        )
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
    if limit is not None:
        panel.thresholds(_thresholds((limit,), "transparent"))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(looks.GraphThresholdsStyleMode.DASHED_AND_AREA))
    for place, line in enumerate(shown):
        panel.with_target(_query(line, chr(ord("A") + place)))
    return panel


def states(about: About, line: Line, names: dict[int, tuple[str, str]]) -> statetimeline.Panel:
    """Which of several states each series is in over time; `names` gives each value's word and colour."""
    words = {str(value): models.ValueMappingResult(text=word, color=color) for value, (word, color) in names.items()}
    return (
        statetimeline.Panel()
        .title(about.title)
        .description(about.meaning)
        .datasource(SOURCE)
        .span(about.columns)
        .height(about.rows)
        .unit(about.unit)
        .mappings([models.ValueMap(options=words)])
        .show_value(looks.VisibilityMode.NEVER)
        .merge_values(True)
        .row_height(0.8)
        .legend(common.VizLegendOptions().show_legend(True).placement(looks.LegendPlacement.BOTTOM))
        .with_target(_query(line, "A"))
    )


def facts(about: About, expr: str, columns: dict[str, str]) -> table.Panel:
    """A row for each series as it is now; `columns` are the labels that are shown, in order, with their headings."""
    order = {label: place for place, label in enumerate(columns)}
    return (
        table.Panel()
        .title(about.title)
        .description(about.meaning)
        .datasource(SOURCE)
        .span(about.columns)
        .height(about.rows)
        .unit(about.unit)
        .with_transformation(
            models.DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": list(columns)}})
        )
        .with_transformation(
            models.DataTransformerConfig(id_val="organize", options={"indexByName": order, "renameByName": columns})
        )
        .with_target(prometheus.Dataquery().expr(expr).ref_id("A").instant().format(queries.PromQueryFormat.TABLE))
    )


def _query(line: Line, name: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(line.expr).legend_format(line.legend).ref_id(name).range()


def _thresholds(steps: tuple[Step, ...], calm: str) -> boards.ThresholdsConfig:
    colors = [models.Threshold(value=None, color=calm), *(models.Threshold(value=s.at, color=s.color) for s in steps)]
    return boards.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(colors)
