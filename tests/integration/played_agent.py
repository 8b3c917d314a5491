"""An agent played by a test: real worker processes on real pipes, and every word that they say.

Rule: every wait has a deadline, and says what was said instead of what it waited for.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from elastic.agent.processes import ZYGOTE_COMMAND
from elastic.agent.zygote import PR_SET_CHILD_SUBREAPER, SpareRequest, adopt_orphans
from elastic.core.config import JobSpec
from elastic.core.facts import (
    Assignment,
    Entry,
    JobId,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.messages import (
    Announce,
    Assign,
    PipeToAgent,
    PipeToWorker,
    Progress,
    Reported,
    Warm,
    WorkerUpdate,
)
from elastic.wire.codec_stream import FROM_WORKER, TO_WORKER
from elastic.wire.frames import FrameReader, encode_frame
from elastic.worker.process.zygote import FORKED
from tests.patience import DEADLINE_S

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"


def leave_orphans() -> None:
    """Adopt no more processes, which other tests would find as children of theirs."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


class Forked:
    """A process that the zygote forked, and that this one has adopted."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._code: int | None = None

    def send_signal(self, number: int) -> None:
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return its exit code, minus a signal's number, None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                os.close(self._fd)
        return self._code

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit code; None if it still runs then."""
        if self._code is None:
            select.select([self._fd], [], [], timeout_s)
        return self.poll()


class PlayedZygote:
    """The zygote of the node, which has imported torch once for all tests of a module."""

    def __init__(self) -> None:
        adopt_orphans()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(DEADLINE_S)
        self._process = subprocess.Popen(
            [*ZYGOTE_COMMAND, "--socket-fd", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            cwd=ROOT,
        )
        theirs.close()
        self._forked = 0

    def fork(self, pipe: socket.socket, output: int) -> Forked:
        """Return a new spare with this end of a pipe, which prints to `output`."""
        self._forked += 1
        request = SpareRequest.of(self._forked, "", None)
        socket.send_fds(self._sock, [request.text()], [pipe.fileno(), output])
        _, pid = FORKED.unpack(self._sock.recv(FORKED.size))
        return Forked(pid)

    def close(self) -> None:
        """End it, once nothing that it forked is left."""
        self._sock.close()
        self._process.kill()
        self._process.wait(DEADLINE_S)
        leave_orphans()


@dataclass
class Played:
    """One process, seen from its agent.

    Attributes:
        said: everything it has said, oldest first.
        received: how much of that the test has waited for already.
    """

    worker_id: WorkerId
    process: Forked
    sock: socket.socket
    log: Path
    said: list[PipeToAgent] = field(default_factory=list)
    received: int = 0
    frames: FrameReader = field(default_factory=FrameReader)
    store_address: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, message: PipeToWorker) -> None:
        self.sock.sendall(encode_frame(TO_WORKER.encode(message)))

    def wait_for(self, wanted: Callable[[PipeToAgent], T | None], what: str) -> T:
        """Return what `wanted` makes of the next message for which it is not None."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            while self.received < len(self.said):
                found = wanted(self.said[self.received])
                self.received += 1
                if found is not None:
                    return found
            if not self._receive(deadline - time.monotonic()):
                raise AssertionError(
                    f"{self.worker_id} did not say {what}; it said {self.said[-5:]}, "
                    f"code {self.process.poll()}, log:\n{self.log.read_text()[-4000:]}"
                )

    def _receive(self, timeout_s: float) -> bool:
        readable, _, _ = select.select([self.sock], [], [], max(0.0, timeout_s))
        try:
            data = self.sock.recv(65536) if readable else b""
        except ConnectionResetError:
            data = b""
        self.said += [FROM_WORKER.decode(payload) for payload in self.frames.feed(data)]
        return bool(data)

    def wait_phase(self, phase: WorkerPhase, generation: int = 0) -> WorkerReport:
        def wanted(message: PipeToAgent) -> WorkerReport | None:
            if not isinstance(message, WorkerUpdate):
                return None
            report = message.report
            is_it = (report.phase, report.generation) == (phase, generation)
            return report if is_it else None

        return self.wait_for(wanted, f"{phase} in {generation}")

    def wait_step(self, generation: int) -> Progress:
        """Return the first progress of a generation."""

        def wanted(message: PipeToAgent) -> Progress | None:
            is_it = isinstance(message, Progress) and message.generation == generation
            return message if is_it else None

        return self.wait_for(wanted, f"a step in {generation}")

    def wait_reported(self, *, with_checkpoint: bool = False) -> Reported:
        def wanted(message: PipeToAgent) -> Reported | None:
            if not isinstance(message, Reported):
                return None
            return message if message.report.checkpoint or not with_checkpoint else None

        return self.wait_for(wanted, "a report")

    def wait_failure(self) -> WorkerReport:
        def wanted(message: PipeToAgent) -> WorkerReport | None:
            is_it = isinstance(message, WorkerUpdate) and message.report.failure is not None
            return message.report if is_it else None

        return self.wait_for(wanted, "a failure")

    def wait_exit(self) -> int:
        code = self.process.wait(DEADLINE_S)
        assert code is not None, f"{self.worker_id} is still there"
        return code


class PlayedAgent:
    """Starts processes and makes workers of them; ends them all at its own end."""

    def __init__(self, zygote: PlayedZygote, directory: Path) -> None:
        self._zygote = zygote
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        self._all: list[Played] = []

    def __enter__(self) -> PlayedAgent:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._all:
            one.process.send_signal(signal.SIGCONT)
            one.process.kill()
        for one in self._all:
            one.process.wait(DEADLINE_S)
            one.sock.close()

    def spares(self, count: int) -> list[Played]:
        """Start processes and wait until all are warm."""
        started = [self._start() for _ in range(count)]
        for one in started:
            one.wait_for(lambda m: m if isinstance(m, Warm) else None, "Warm")
        return started

    def _start(self) -> Played:
        number = len(self._all)
        log = self._directory / f"worker{number}.log"
        ours, theirs = socket.socketpair()
        with log.open("wb") as output:
            process = self._zygote.fork(theirs, output.fileno())
        theirs.close()
        one = Played(WorkerId(f"n{number}/1"), process, ours, log)
        self._all.append(one)
        return one

    def workers(self, count: int, entry: Entry, run_path: Path | str = "") -> list[Played]:
        """Make workers of fresh spares and wait until all are ready for a group."""
        ready = self.spares(count)
        for one in ready:
            one.tell(Assign(one.worker_id, spec_of(entry, run_path), HOST))
        for one in ready:
            one.store_address = one.wait_phase(WorkerPhase.READY).store_address
        return ready


def spec_of(entry: Entry, run_path: Path | str = "") -> JobSpec:
    return JobSpec(
        job_id=JobId("job-1"),
        name="played",
        entry=entry,
        min_workers=1,
        max_workers=8,
        collective_timeout_s=DEADLINE_S,
        run_path=str(run_path),
    )


def announce(members: Sequence[Played], generation: int, checkpoint: str = "") -> None:
    """Make these the group of a generation, each on a node of its own."""
    for rank, one in enumerate(members):
        assignment = Assignment(
            JobId("job-1"),
            one.worker_id,
            generation,
            rank,
            len(members),
            local_rank=0,
            local_world_size=1,
            node_rank=rank,
            num_nodes=len(members),
            leader_address=members[0].store_address,
            reported_checkpoint=checkpoint,
            group_key=f"secret of {generation}",
        )
        one.tell(Announce(assignment))
