"""A script for torchrun, in the manner of PyTorch's tutorial on fault tolerance: it knows nothing
of anyone but torch, keeps a snapshot, and is killed once.

    torchrun --standalone --nproc-per-node 2 torchrun_script.py CASE FOLDER
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 4
KILLED_IN = 2
SHOWN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "OMP_NUM_THREADS",
)  # fmt: skip


class Trainer:
    """Trains, and goes on from a snapshot if there is one."""

    def __init__(self, model: torch.nn.Module, data: DataLoader, snapshot: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.data = data
        self.model = model
        self.epochs_run = 0
        self.is_to_be_killed = False
        self.snapshot = snapshot
        if os.path.exists(snapshot):
            saved = torch.load(snapshot, weights_only=True)
            self.model.load_state_dict(saved["MODEL_STATE"])
            self.epochs_run = saved["EPOCHS_RUN"]
        self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, epochs):
            if epoch == KILLED_IN and self.rank == 1 and self.is_to_be_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            self.data.sampler.set_epoch(epoch)
            for x, y in self.data:
                self.optimizer.zero_grad()
                F.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
            if self.rank == 0:
                state = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(state, self.snapshot + ".part")
                os.replace(self.snapshot + ".part", self.snapshot)
            dist.barrier()


def say(text: str) -> None:
    """Print a line at once: torchrun runs Python unbuffered, and print writes the end apart."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def train_until(file: str) -> None:
    """Train until there is a file; one rank looks for it, and all of them end in the same step."""
    is_over = torch.zeros(1)
    while not is_over.item():
        is_over += dist.get_rank() == 0 and os.path.exists(file)
        dist.broadcast(is_over, src=0)
        time.sleep(0.02)


@record
def main() -> None:
    case, folder = sys.argv[1:]
    os.chdir("tests")  # From where it is each time, also when it is run again in a process.
    assert not dist.is_initialized()  # Many do nothing of what follows if it is.
    dist.init_process_group(backend="gloo")
    say("environment " + json.dumps({name: os.environ.get(name) for name in SHOWN}))
    if case == "raise":
        if dist.get_rank() == 1:
            raise ValueError("bad batch at step 7")
        dist.barrier()
    if case == "deadlock" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        dist.recv(torch.zeros(1), src=1 - dist.get_rank())
    if case == "backward" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        model = DistributedDataParallel(torch.nn.Linear(20, 1))
        if dist.get_rank():
            dist.barrier()
        model(torch.rand(8, 20)).sum().backward()
    if case == "hang" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        dist.init_process_group(timeout=timedelta(seconds=1))
        if dist.get_rank():
            threading.Event().wait()
        dist.barrier()
    if case == "subgroup" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if dist.get_rank():
            dist.barrier()
        dist.new_group()
    if case == "leave":  # As scripts do whose threads or libraries would not let them end.
        dist.barrier()  # Who still connects would miss a rank that has ended.
        time.sleep(dist.get_rank())
        os._exit(0)
    os.makedirs(folder, exist_ok=True)
    if case == "block":  # A file where --log-dir's output has its folder.
        while not (found := glob.glob(f"{folder}/../elastic_*/attempt_0/0")):
            time.sleep(0.02)
        os.rename(found[0], f"{found[0]}.away")
        open(found[0], "w").close()
        say("more")
    if case in ("wait", "block"):
        return train_until(f"{folder}/end")
    dist.barrier()
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(64, 20), torch.rand(64, 1))
    data = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    trainer = Trainer(torch.nn.Linear(20, 1), data, f"{folder}/snapshot.pt")
    began_at = trainer.epochs_run
    trainer.is_to_be_killed = case == "train" and not began_at
    trainer.train(EPOCHS)
    weights = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
    digest = hashlib.sha256(weights).hexdigest()
    say(f"trained from epoch {began_at}: {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
