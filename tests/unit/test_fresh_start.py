"""What a script that is run again finds: what its first run has found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elastic.worker.fresh_start import KEPT
from tests.patience import DEADLINE_S

CHANGES = """
import gc, logging, multiprocessing, os, signal, socket, sys, threading, warnings
import numpy as np
import torch
import torch.multiprocessing
from torch import backends

os.chdir("sub")
os.umask(0o77)
os.environ["OF_THE_SCRIPT"] = "set"
os.environ["RANK"] = "7"
sys.path.insert(0, "/of/the/script")
sys.stdin, sys.stdout, sys.stderr = None, open(os.devnull, "w"), open(os.devnull, "w")
sys.excepthook = sys.displayhook = threading.excepthook = print
sys.setrecursionlimit(5000)
for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
    signal.setitimer(timer, 1000)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM):
    signal.signal(number, signal.SIG_IGN)
logging.basicConfig(filename="log", level="DEBUG")
logging.disable(logging.INFO)
mine = logging.getLogger("mine")
mine.addHandler(logging.StreamHandler())
mine.propagate = False
logging.getLogger("concurrent.futures").setLevel("CRITICAL")
warnings.simplefilter("error")
logging.captureWarnings(True)
gc.disable()
gc.set_threshold(5)
socket.setdefaulttimeout(3)
multiprocessing.set_start_method("spawn")
torch.multiprocessing.set_sharing_strategy("file_system")
np.seterr(all="raise")
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.autograd.set_detect_anomaly(True)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = False
torch.set_num_threads(torch.get_num_threads() + 1)
torch.set_float32_matmul_precision("high")
backends.cuda.matmul.fp32_precision = "ieee"  # Of the two interfaces together none can be read.
backends.cudnn.enabled = backends.cudnn.allow_tf32 = False
backends.cudnn.benchmark = backends.cudnn.deterministic = True
backends.cudnn.benchmark_limit = 3
backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
for kind in ("flash", "mem_efficient", "math", "cudnn"):
    getattr(backends.cuda, f"enable_{kind}_sdp")(False)
"""
TWICE = """
import faulthandler, os, signal, sys
faulthandler.register(signal.SIGUSR1, all_threads=True)
script, out = sys.argv[1], open(sys.argv[2], "w")
from elastic.core.world import Entry, EntryKind
from elastic.worker import entry
from elastic.worker.fresh_start import KEPT, _Logger

def read(kept):
    try:
        found = kept.read()
    except RuntimeError as error:
        return error
    if kept.name != "loggers":
        return found
    # One that was made, and is not set up, is as good as none; torch makes some at any time.
    names = [name for name in found[1] if not name.startswith("torch")]
    return found[0], {name: found[1][name] for name in names if found[1][name] != _Logger()}

prepare = entry.load(Entry(EntryKind.SCRIPT, script))
call = prepare()
first = {kept.name: read(kept) for kept in KEPT}
call.run()
second = {kept.name: read(kept) for kept in KEPT}
prepare()
third = {kept.name: read(kept) for kept in KEPT}
for name, found in first.items():
    if second[name] == found:
        print("unchanged:", name, file=out)
    if third[name] != found:
        print("not put back:", name, found, third[name], file=out)
print("RANK", os.environ["RANK"], file=out)
out.flush()
os.kill(os.getpid(), signal.SIGUSR1)
print("lives on", file=out, flush=True)
os._exit(0)
"""


def run(tmp_path: Path, text: str, twice: str = TWICE) -> tuple[str, str]:
    """Run a script in a process of its own; returns what was found, and its stderr."""
    (tmp_path / "sub").mkdir()
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", twice, str(script), str(out)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out.read_text(), done.stderr


def test_all_that_a_script_sets_for_its_process_is_put_back(tmp_path: Path) -> None:
    """Its place is not: the new group has given it another one."""
    found, said = run(tmp_path, CHANGES)
    assert found == "RANK 7\nlives on\n"
    assert "most recent call first" in said, "SIGUSR1 has the stacks written again"
    assert (tmp_path / "sub" / "log").exists()


def test_names_in_the_table_are_told_apart() -> None:
    names = [kept.name for kept in KEPT]
    assert len(set(names)) == len(names)


THREADS = """
import http.server, threading, time
from concurrent.futures import ThreadPoolExecutor
gate = threading.Event()
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
threading.Thread(target=lambda: gate.wait(), name="watcher", daemon=True).start()
threading.Thread(target=time.sleep, args=(0,), name="gone").start()
ThreadPoolExecutor(1, thread_name_prefix="idle").submit(gate.is_set)
"""
THREE_TIMES = """
import logging, os, sys
out = sys.argv[2]
logging.basicConfig(level="WARNING")
from elastic.core.world import Entry, EntryKind
from elastic.worker import entry
prepare = entry.load(Entry(EntryKind.SCRIPT, sys.argv[1]))
prepare().run()
prepare()
prepare()
open(out, "w").close()
os._exit(0)
"""


def test_threads_that_go_on_from_the_last_run_are_named_once(tmp_path: Path) -> None:
    _, said = run(tmp_path, THREADS, THREE_TIMES)
    lines = [line for line in said.splitlines() if "threads_left" in line]
    assert len(lines) == 1, said
    assert "names='metrics','watcher':" in lines[0]
    assert "--fresh-process" in lines[0]


def test_a_working_directory_that_is_gone_is_told_as_such(tmp_path: Path) -> None:
    text = "import os, pathlib; os.chdir('..'); pathlib.Path('sub').rmdir()\n"
    twice = (
        "import os; os.chdir('sub')\n" + THREE_TIMES.rpartition("prepare()\nprepare()")[0]
        + "from elastic.errors import UsageError\n"
        "try: prepare()\n"
        "except UsageError as error: open(out, 'w').write(str(error))\n"
        "os._exit(0)\n"
    )  # fmt: skip
    found, _ = run(tmp_path, text, twice)
    assert "sub, in which the script is to run again" in found


def test_a_package_still_finds_its_parts(tmp_path: Path) -> None:
    text = "import sys; sys.path.append('/x/site-packages/pkg/_vendor'); sys.path.append('/y')\n"
    twice = THREE_TIMES.replace(
        'open(out, "w").close()', 'open(out, "w").write(" ".join(sys.path[-2:]))'
    )
    found, _ = run(tmp_path, text, twice)
    assert found.endswith(" /x/site-packages/pkg/_vendor")
    assert "/y" not in found.split()
