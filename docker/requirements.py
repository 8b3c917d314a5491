"""Print the install requirements of pyproject.toml, without those named on the command line.

The image of the coordinator is built from it: torch is two gigabytes that it never loads. `+NAME`
adds those of an extra.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

extras = [name[1:] for name in sys.argv[1:] if name.startswith("+")]
without = {name for name in sys.argv[1:] if not name.startswith("+")}
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
names = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
if not without <= names:
    sys.exit(f"not among the requirements: {sorted(without - names)}; there are {sorted(names)}")
more = [line for extra in extras for line in project["optional-dependencies"][extra]]
for line in [*project["dependencies"], *more]:
    if re.split(r"[^\w-]", line)[0] not in without:
        print(line)
