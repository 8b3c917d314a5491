"""A script for torchrun that expects a process of its own each time that it begins: it has a port,
a child, a function at exit, a library that remembers its rank, and an `except` around its steps.

    elastic run --min 1 --max 3 whole_script.py CASE FOLDER
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

EPOCHS = 4
STEPS = 20
BATCH = 4
KILLED = {(0, STEPS - 1): 1, (2, 5): 0}
"""Which rank is killed where, once: at an end of an epoch others would run through what is left."""


def note(folder: Path, name: str, text: object) -> None:
    with (folder / name).open("a") as file:
        file.write(f"{text}\n")


def main() -> None:
    folder = Path(sys.argv[2])
    sys.path.append(str(folder.with_name("site-packages")))
    import remembering  # Installed, as far as anyone can tell.

    folder.mkdir(exist_ok=True)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    atexit.register(note, folder, "goodbyes", rank)
    server = socket.create_server(("127.0.0.1", int(os.environ["FIRST_PORT"]) + rank))
    child = subprocess.Popen(["sleep", "600"])
    note(folder, "children", child.pid)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = folder / "epoch"
    first = int(state.read_text()) if state.exists() else 0
    dist.barrier()
    for epoch in range(first, EPOCHS):
        if rank == 0:
            (folder / "part").write_text(str(epoch))
            (folder / "part").replace(state)
        with (folder / f"seen-{epoch}-{rank}").open("w", buffering=1) as seen:
            for step in range(STEPS):
                once = folder / f"died-{epoch}-{step}"
                if KILLED.get((epoch, step)) == rank and world == 3 and not once.exists():
                    once.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    optimizer.zero_grad()
                    model(torch.ones(BATCH, 4)).mean().backward()
                    optimizer.step()
                except Exception as error:
                    note(folder, "skipped", f"{epoch} {step} {error}")
                    continue
                place = step * world + remembering.rank()
                seen.write("".join(f"{place * BATCH + i} {world}\n" for i in range(BATCH)))
                time.sleep(0.01)
    child.kill()
    server.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
