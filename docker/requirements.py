"""Print the install requirements of pyproject.toml, without those named on the command line.

The image of the coordinator is built from it: torch is two gigabytes that it never loads.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

without = set(sys.argv[1:])
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
names = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
if not without <= names:
    sys.exit(f"not among the requirements: {sorted(without - names)}; there are {sorted(names)}")
for line in project["dependencies"]:
    if re.split(r"[^\w-]", line)[0] not in without:
        print(line)
