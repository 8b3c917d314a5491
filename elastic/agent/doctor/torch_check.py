"""torch as a worker would find it: imported in a process of its own, with two ranks over gloo.

Rule: the agent itself never imports torch; the question is asked of a child, with a deadline.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from elastic.agent.doctor.check import Check, fail, ok, warn

TIMEOUT_S = 120.0
GLOO_S = 20
SCRIPT = f"""
import json, os, sys, tempfile
said = {{}}
import torch
said["torch"] = torch.__version__
said["cuda"] = torch.version.cuda
said["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
try:
    said["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
except Exception as error:
    said["nccl"] = None
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import datetime
import torch.distributed as dist

def reduce(rank, folder):
    store = dist.FileStore(folder + "/store", 2)
    timeout = datetime.timedelta(seconds={GLOO_S})
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    number = torch.tensor([rank + 1.0])
    dist.all_reduce(number)
    return number.item()

with tempfile.TemporaryDirectory() as folder:
    child = os.fork()
    if child == 0:
        try:
            reduce(1, folder)
        finally:
            os._exit(0)
    try:
        said["gloo"] = "" if reduce(0, folder) == 3.0 else "a sum came out wrong"
    except Exception as error:
        said["gloo"] = str(error)
        os.kill(child, 9)
    os.waitpid(child, 0)
print(json.dumps(said))
sys.stdout.flush()
os._exit(0)
"""


def check_torch(num_gpus: int, python: str = sys.executable) -> list[Check]:
    """Look at torch and gloo, and whether torch sees the GPUs that the driver shows."""
    try:
        done = subprocess.run(
            [python, "-c", SCRIPT],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [fail("torch", f"not imported in {TIMEOUT_S:.0f} s", "look at the disk it is on")]
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        text = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [fail("torch", text[:300], "pip install torch, in this environment: " + python)]
    return judge_torch(json.loads(lines[-1]), num_gpus)


def judge_torch(said: dict[str, Any], num_gpus: int) -> list[Check]:
    """Say what the child found.

    Args:
        said: torch, cuda, nccl, devices and gloo ("" for well, else what went wrong).
        num_gpus: how many the driver shows.
    """
    found = f"torch {said['torch']}"
    if said["cuda"]:
        found += f", CUDA {said['cuda']}, NCCL {said['nccl'] or 'absent'}"
    if num_gpus and not said["devices"]:
        text = f"{found}; it sees none of {num_gpus} GPUs"
        checks = [fail("torch", text, "install a build for this driver's CUDA (nvidia-smi)")]
    elif said["devices"] < num_gpus:
        text = f"{found}; it sees {said['devices']} of {num_gpus} GPUs"
        checks = [warn("torch", text, "look at CUDA_VISIBLE_DEVICES and nvidia-smi")]
    else:
        checks = [ok("torch", f"{found}, {said['devices']} GPUs")]
    if said["gloo"]:
        checks.append(fail("gloo", said["gloo"][:300], "let processes talk over loopback (lo)"))
    else:
        checks.append(ok("gloo", "two processes added numbers over loopback"))
    return checks
