"""The oldest versions that pyproject.toml allows, as a constraints file."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for line in project["dependencies"]:
    found = re.fullmatch(r"([\w-]+)>=([\w.]+)(,<[\w.]+)?", line)
    if found is None:
        raise SystemExit(f"'{line}' has no lowest version")
    print(f"{found[1]}=={found[2]}")
