"""A process that forms and aborts groups on request, with one JSON line per order.

`python -m tests.workers.group_member` forks one for each connection that it receives over its
standard input, a socket; see `members.Template`. In a member the control thread reads the orders.
It carries out those in AT_ONCE itself; the main thread carries out the others, one after the other.
The reply to each is one line with the order's id, the value or the error, and the start and end
times in seconds (CLOCK_MONOTONIC, which all processes of a machine share).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint, distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.utils import _sync_params_and_buffers
from torch.nn.parallel import DistributedDataParallel

from elastic.worker.base.interrupt import GroupChanged, Interrupter
from elastic.worker.group.group import GroupSpec, ProcessGroups
from elastic.worker.group.store_server import StoreServer
from elastic.worker.process.gloo_watchdog import StuckWaitWatchdog
from tests.workers.reduce_steps import Steps

HOST = "127.0.0.1"
KEY = "a secret of the generation"


class Member:
    """The orders, each a method whose return value goes into the reply."""

    def __init__(self) -> None:
        self.server = StoreServer(HOST)
        self.groups = ProcessGroups()
        self.interrupter = Interrupter(overdue=StuckWaitWatchdog(self.groups).check)
        self.subgroup: Any = None
        self.steps: Steps | None = None
        self.trains_in = 0
        self.computes = False

    # ------------------------------------------------------------------------- control thread

    def abort(self, generation: int | None = None) -> None:
        self.groups.abort(generation)

    def hung_up(self) -> bool:
        return self.groups.peer_hung_up()

    def is_forming(self) -> bool:
        """Return whether a thread is connecting or forming a group in torch."""
        return any(thread.name == "elastic-form" for thread in threading.enumerate())

    def received(self) -> int:
        return self.groups.received_bytes()

    def trains(self, generation: int) -> bool:
        return self.trains_in == generation

    def stop_computing(self) -> None:
        self.computes = False

    def interrupt(self, generation: int) -> None:
        self.interrupter.interrupt(generation, "told to")

    # ---------------------------------------------------------------------------- main thread

    def address(self) -> str:
        return self.server.address

    def form(self, **fields: Any) -> None:
        spec = {"backend": "gloo", "host": HOST, "timeout_s": 60.0, "job_id": "job"} | fields
        spec = {"key": KEY} | spec
        if spec["rank"] == 0:
            self.server.admit(spec["generation"], spec["key"])
        self.groups.form(GroupSpec(**spec))

    def drop(self) -> None:
        self.groups.drop()

    def all_reduce(self, size: int = 1000, repeat: int = 1) -> float:
        """Sum rank + 1 over the members; W (W + 1) / 2 is the correct value."""
        for _ in range(repeat):
            tensor = torch.full((size,), float(dist.get_rank() + 1))
            dist.all_reduce(tensor)
        return float(tensor[-1])

    def use_device(self, index: int) -> None:
        torch.cuda.set_device(index)

    def cuda_reduce(self) -> float:
        tensor = torch.full((1000,), float(dist.get_rank() + 1), device="cuda")
        dist.all_reduce(tensor)
        return float(tensor[-1])

    def pass_on(self, how: str, size: int) -> None:
        """Send and receive large tensors repeatedly."""
        rank, world = dist.get_rank(), dist.get_world_size()
        ours, all_of_it = torch.ones(size), torch.empty(world * size)
        while True:
            if how == "broadcast":
                dist.broadcast(ours, 0)
            elif how == "buffers":
                _sync_params_and_buffers(dist.group.WORLD, [ours], 1 << 20, 0)
            elif how == "all_to_all":
                dist.all_to_all_single(all_of_it, torch.ones(world * size))
            elif how == "all_gather":
                dist.all_gather(list(all_of_it.chunk(world)), ours)
            else:
                others = [other for other in range(world) if other != rank]
                works = [dist.irecv(all_of_it.chunk(world)[other], other) for other in others]
                works += [dist.isend(ours, other) for other in others]
                for work in works:
                    work.wait()

    def wait_work(self) -> None:
        """Block in `work.wait()`, as reducers do."""
        dist.all_reduce(torch.ones(1000), async_op=True).wait()

    def wait_store(self) -> None:
        self.groups.store.wait(["a key that nobody sets"])

    def wait_barrier(self) -> None:
        dist.barrier()

    def backward(self, steps: int) -> float:
        """Train a DDP model; return the sum of the last gradient, equal on all ranks."""
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(200, 200))
        for _ in range(steps):
            model.zero_grad()
            model(torch.full((8, 200), float(dist.get_rank() + 1))).square().mean().backward()
        return sum(float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None)

    def begin_steps(self, consistency: str, over: str) -> None:
        """Start a run of the reducer in this group."""
        if self.steps is not None:
            self.steps.reducer.close()
        self.steps = Steps(consistency, over)
        self.steps.attach()

    def attach_steps(self) -> None:
        """Continue the run in another group."""
        self._the_steps().attach()

    def do_steps(self, until: int, die_at: int) -> dict[str, Any]:
        return self._the_steps().run(until, die_at)

    def _the_steps(self) -> Steps:
        assert self.steps is not None, "no run has begun"
        return self.steps

    def loop(self, name: str, **arguments: Any) -> Any:
        """Run one rank of a training loop; see `loops`."""
        # Imported here: only training needs the engine, the other orders do not.
        from tests.workers import loops

        return loops.run(name, arguments)

    def compute(self) -> None:
        """Keep the interpreter busy with Python code until `stop_computing`."""
        self.computes = True
        while self.computes:
            pass

    def is_computing(self) -> bool:
        return self.computes

    def train_until_changed(self, generation: int, how: str = "", size: int = 0) -> str:
        """Block in a collective inside `run`, as a worker does."""

        def train() -> None:
            self.trains_in = generation
            try:
                self.pass_on(how, size) if how else self.wait_work()
            except RuntimeError:
                # Torch's own error may come first: then `check` raises the actual reason.
                self.interrupter.check()
                raise

        try:
            self.interrupter.run(generation, train)
        except GroupChanged as change:
            return change.reason
        return "returned"

    def new_group(self, ranks: list[int]) -> float:
        """Create a subgroup on all members, and sum ranks within it."""
        self.subgroup = dist.new_group(ranks)
        tensor = torch.tensor([float(dist.get_rank())])
        if dist.get_rank() in ranks:
            dist.all_reduce(tensor, group=self.subgroup)
        return float(tensor)

    def forget_form_timeout(self) -> None:
        """Set the timeout for forming another full group to nearly zero."""
        life = self.groups._resources
        assert life is not None
        life.spec = replace(life.spec, form_timeout_s=1e-3)

    def subgroup_reduce(self) -> None:
        dist.all_reduce(torch.ones(10), group=self.subgroup)

    def destroy_subgroup(self) -> None:
        group, self.subgroup = self.subgroup, None
        dist.destroy_process_group(group)

    def script(self, backend: str) -> list[Any]:
        """Create and destroy a group as torchrun scripts do, twice, as after a re-entry."""
        sums = []
        for _ in range(2):
            dist.init_process_group(backend)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            sums.append(float(tensor))
            dist.destroy_process_group()
        return [*sums, dist.is_initialized()]

    def saves(self, folder: str) -> int:
        """Save in the background without waiting, beside collectives; return how many are done."""
        saves = []
        for number in range(5):
            state = {"weight": torch.ones(1000)}
            saves.append(checkpoint.async_save(state, checkpoint_id=f"{folder}/{number}"))
            dist.all_reduce(torch.ones(1000))
        return len([save.result() for save in saves])

    def wrong_script(self) -> None:
        dist.init_process_group("gloo", rank=17, world_size=99)

    def impatient_script(self, timeout_s: float) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        dist.barrier()

    def norm_in_parts(self) -> float:
        """Return the norm of the tensor 0, 1, 2, 3, sharded within each row of a 2 x 2 mesh."""
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(4.0)
        shards = distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        norm = torch.linalg.vector_norm(shards)
        assert isinstance(norm, DTensor)
        return float(norm.full_tensor())

    def mesh(self) -> int:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        return mesh.size()

    def fail_to_connect(self, count: int) -> None:
        """Time out `count` times on a leader that accepts connections but never replies."""
        with socket.create_server((HOST, 0)) as silent:
            port = silent.getsockname()[1]
            for number in range(count):
                with contextlib.suppress(Exception):
                    self.form(
                        generation=10**6 + number,
                        rank=1,
                        world_size=2,
                        leader_address=f"{HOST}:{port}",
                        form_timeout_s=0.05,
                    )

    def state(self) -> dict[str, Any]:
        """Return counts that must not increase, and values that must equal a new member's."""
        gc.collect()
        return {
            "pid": os.getpid(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "group_count": distributed_c10d._world.group_count,
            "initialized": dist.is_initialized(),
            "hook": sys.excepthook is sys.__excepthook__,
        }


AT_ONCE = (
    "abort", "hung_up", "interrupt", "is_computing", "is_forming", "received", "stop_computing",
    "trains",
)  # fmt: skip


def answer(member: Member, order: dict[str, Any]) -> None:
    """Carry out one order and send the reply, over the connection that it came by.

    Not over standard output: gloo of torch 2.9 prints there.
    """
    began = time.monotonic()
    result: dict[str, Any] = {"id": order["id"], "began": began}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result["value"] = getattr(member, order["do"])(**order["with"])
    except BaseException as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result["ended"] = time.monotonic()
    send(result)


def send(result: dict[str, Any]) -> None:
    os.write(0, json.dumps(result).encode() + b"\n")


def serve() -> None:
    """Handle orders until standard input ends."""
    member = Member()
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] in AT_ONCE:
                answer(member, order)
            else:
                orders.put(order)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    torch.set_num_threads(1)
    send({"id": 0, "began": 0.0, "ended": 0.0})
    while True:
        answer(member, orders.get())


def main() -> None:
    """Fork a member for each connection that arrives, and report its pid and its exit code."""
    control = socket.socket(fileno=os.dup(0))
    wakes, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, wakes], [], [])
        if wakes in ready:
            wakes.recv(64)
            for pid, code in ended():
                report(control, pid=pid, code=code)
        if control not in ready:
            continue
        data, connections, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (control, wakes, woken):
                one.close()
            os.dup2(connections[0], 0)
            os.close(connections[0])
            serve()
        os.close(connections[0])
        report(control, pid=pid)


def ended() -> Iterator[tuple[int, int]]:
    """Yield pid and exit code of each member that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def report(control: socket.socket, **what: int) -> None:
    """Send a line to the owner of the crew."""
    control.sendall(json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main()
