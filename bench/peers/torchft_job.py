"""The model and data of `torchrun_job.py` under torchft, one replica of one worker.

Rule: as in torchft's own example. Survivors keep the model in memory, and who comes back gets it
from them; a replica's samples are those of its number, whoever else is there. One optimizer steps
everything, because torchft commits a step with the optimizer.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import TCPStore
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from bench.peers import torchrun_job

TIMEOUT = timedelta(seconds=5)


def main() -> None:
    """Train until somebody ends this process."""
    parser = torchrun_job.parser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    args = parser.parse_args()
    marks = os.open(args.marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    data = torchrun_job.data_of(args.samples)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data, num_replicas=args.world, rank=args.number
    )
    loader = DataLoader(data, batch_size=-(-args.global_batch // args.world), sampler=sampler)
    torch.manual_seed(0)
    module = torchrun_job.Net(args.width, args.samples)
    inner = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    replica = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=f"replica{args.number}_{uuid.uuid4()}",
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(replica, module)
    optimizer = Optimizer(replica, inner)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for x, y, ids in loader:
            time.sleep(args.pace)
            optimizer.zero_grad()
            logits, count = model(x, ids)
            (F.cross_entropy(logits, y) + count).backward()
            before = replica.current_step()
            optimizer.step()
            if replica.current_step() > before and replica.is_participating():
                # In the first step of a quorum who joins it only receives the model.
                world = replica.num_participants()
                life = replica._quorum_id * 100 + world
                line = (
                    f"{time.time_ns()} {replica.participating_rank()} {life} "
                    f"{replica.current_step()} {os.getpid()} {world}\n"
                )
                os.write(marks, line.encode())
        epoch += 1


if __name__ == "__main__":
    main()
