"""Prints what pyproject.toml in this folder asks for, one requirement a line; its arguments are names of extras."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
wanted = project["dependencies"] + [item for extra in sys.argv[1:] for item in project["optional-dependencies"][extra]]
sys.stdout.write("\n".join(wanted) + "\n")
