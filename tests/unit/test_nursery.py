"""What is imported once for all workers of a script, and what each imports for itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.patience import DEADLINE_S

GROWS = """
import json, os, socket, sys
from elastic.worker.process.import_zygote import ImportPlan, run

def grown(text):
    with open("script.py", "w") as file:
        file.write(text)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        run(ImportPlan(os.path.abspath("script.py"), (os.getcwd(), sys.argv[1]), {}), theirs)
        known = [name for name in ("quiet", "asks", "starts", "own") if name in sys.modules]
        theirs.send(json.dumps(["grown", *known]).encode())
        os._exit(0)
    theirs.close()
    return json.loads(ours.recv(10000))

# Up to the first statement that does something, and nothing of the script's own.
print(grown("'''text'''\\nimport quiet, own\\nfrom quiet import part\\nx = 1\\nimport starts"))
print(grown("import quiet, imports_who_asks"))
print(grown("import quiet, starts"))
"""


def test_what_asks_for_its_place_or_starts_something_is_left_to_each_worker(
    tmp_path: Path,
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (tmp_path / "own.py").write_text("")
    for name, text in {
        "quiet": "import os; os.environ.get('HOME')",
        "asks": "import os; rank = int(os.getenv('RANK', '0'))",
        "imports_who_asks": "from asks import rank",
        "starts": "import threading; threading.Thread(target=threading.Event().wait).start()",
    }.items():
        (installed / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", GROWS, str(installed)],
        cwd=tmp_path, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["['grown', 'quiet']", "['quiet']", "[]"], done.stderr
