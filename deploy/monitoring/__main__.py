"""`python -m monitoring OUT` writes OUT/prometheus/alerts.yaml and OUT/grafana/dashboards/dqkv.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from monitoring.alerts import rules
from monitoring.dashboard import dashboard

NOTE = "# Generated from service/dqkv/metrics.py by deploy/monitoring: edit there, then `make monitoring`.\n"


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such, and lists indented."""

    def increase_indent(self, flow: bool = False, *_: object, **__: object) -> None:
        super().increase_indent(flow, indentless=False)

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def main(out: Path) -> None:
    """Writes both files below a directory."""
    text = yaml.dump(rules(), Dumper=_Dumper, sort_keys=False, width=120)
    _write(out / "prometheus" / "alerts.yaml", NOTE + text)
    text = json.dumps(dashboard(), cls=JSONEncoder, indent=2, sort_keys=True)
    _write(out / "grafana" / "dashboards" / "dqkv.json", f"{text}\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
