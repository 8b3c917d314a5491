"""Worker processes: started as spares, watched by pidfd, killed with all that they started.

Rule: a process's exit is reported after all of its messages and output have been read. Its pid
stays taken (by the zombie) until its session has been swept, so that no signal of ours can reach
an unrelated process. Processes are started from the main thread: their parent-death signal is tied
to the thread that started them. A spare is forked by the zygote, and still becomes our child.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.agent.kernel import (
    DEAD,
    MemoryKills,
    exit_cause,
    kill_quietly,
    process_state,
    readable,
    reap,
    session_members,
    signal_group,
    status_of_zombie,
)
from elastic.agent.logs import Logs, OutputCopy, output_pipe
from elastic.agent.zygote import SpareRequest, Zygote, reap_adopted
from elastic.core.config import STACKS_SIGNAL
from elastic.core.events.agent import (
    AgentEvent,
    ProcessExited,
    ProcessMessageReceived,
    ProcessStarted,
    ProcessStopped,
    SpawnFailed,
)
from elastic.core.facts import Assignment, Entry, WorkerReport
from elastic.core.messages import PROTOCOL, Announce, Assign, PipeToWorker, WorkerUpdate
from elastic.errors import ElasticError, PeerError, check
from elastic.wire.async_pipe import AsyncPipe

log = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "elastic.worker.process.main", "--protocol", PROTOCOL)
ZYGOTE_COMMAND = (sys.executable, "-m", "elastic.worker.process.zygote", "--protocol", PROTOCOL)
POLL_INTERVAL_S = 0.2
"""How often process states are polled, to find stopped processes."""
END_PAUSE_S = 0.01
SWEEPS_MAX = 5
ZYGOTE_LOSSES_MAX = 3
"""In a row, before a first fork: the node has no room for one, so spares start without."""


@dataclass
class Child:
    """One process that this agent started and has not reaped.

    Attributes:
        pid: the operating system's id, also the id of its session and process group.
        end: the agent's end of its pipe, which `pipe` reads and writes.
        listener: posts its messages, until the pipe ends.
        assigned: its output belongs to a worker.
        exited: its exit was reported; only its zombie is left.
        place: its place in the newest group announced to it, None before the first.
    """

    process_id: int
    pid: int
    end: socket.socket
    pipe: AsyncPipe
    output: OutputCopy
    listener: asyncio.Task[None] | None = None
    stopped: bool = False
    assigned: bool = False
    exited: bool = False
    place: Assignment | None = None


def _take_place(child: Child, report: WorkerReport) -> None:
    """Stamp a worker's output from here on with the group that it reports."""
    place, log_file = child.place, child.output.target
    if place is None or place.generation != report.generation:
        return
    if (log_file.generation, log_file.rank) != (place.generation, place.rank):
        child.output.drain()
        log_file.generation, log_file.rank = place.generation, place.rank


@dataclass(frozen=True, kw_only=True)
class SpareCommand:
    """How a spare is started.

    Attributes:
        env: its whole environment.
        command: `--pipe-fd N` is appended.
        zygote: command of the process that forks spares instead, while it runs; `--socket-fd N` is
            appended. Empty for none.
    """

    env: Mapping[str, str]
    command: Sequence[str] = field(default=WORKER_COMMAND)
    zygote: Sequence[str] = ()


@dataclass
class ParentEnds:
    """Our ends of a process's pipe and output, while the zygote forks it.

    Attributes:
        killed: reason to kill it as soon as it is forked, "" for none.
    """

    pipe: socket.socket
    output: int
    killed: str = ""

    def close(self) -> None:
        """Close both ends, because the process does not exist."""
        self.pipe.close()
        os.close(self.output)


class ChildProcesses:
    """All processes of this agent; performs the machine's effects, and posts what happens."""

    def __init__(
        self, launch: SpareCommand, logs: Logs, post: Callable[[AgentEvent], None]
    ) -> None:
        """Start nothing yet; must be called on the event loop, in the main thread."""
        check(
            threading.current_thread() is threading.main_thread(),
            "an agent's processes must be started from the main thread, because their "
            "parent-death signal is tied to the thread that starts them",
        )
        self._launch = launch
        self._logs = logs
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._memory_kills = MemoryKills()
        self._children: dict[int, Child] = {}
        self._forking: dict[int, ParentEnds] = {}
        self._zygote: Zygote | None = None
        self._has_zygote = bool(launch.zygote)
        self._unreaped: list[Zygote] = []
        self._has_forked, self._zygote_losses = False, 0
        self._check_timer: asyncio.TimerHandle | None = None
        self._burials: list[asyncio.Task[None]] = []
        self._all_gone = asyncio.Event()
        self._all_gone.set()

    def spawn(self, process_id: int, job_id: str = "", entry: Entry | None = None) -> None:
        """Start a spare; posts `ProcessStarted` or `SpawnFailed`, soon if not at once.

        Args:
            process_id: the agent's own number for it.
            job_id: of the job that it is for, "" for any.
            entry: of that job, whose imports are made in advance, where possible.
        """
        if self._has_zygote and self._fork(SpareRequest.of(process_id, job_id, entry)):
            return
        try:
            pid, ends = self._start(process_id)
        except OSError as error:
            command = " ".join(self._launch.command)
            self._post(SpawnFailed(process_id, f"cannot start {command}: {error}"))
            return
        self._begin(process_id, pid, ends)

    def _begin(self, process_id: int, pid: int, ends: ParentEnds) -> None:
        """Read the messages of a spare that runs, and watch for its exit."""
        pipe = AsyncPipe(ends.pipe, f"process {process_id} (pid {pid})")
        child = Child(process_id, pid, ends.pipe, pipe, self._logs.copy_spare(ends.output))
        self._children[process_id] = child
        self._all_gone.clear()
        child.listener = asyncio.ensure_future(self._listen(child))
        self._watch(child)
        if self._check_timer is None:
            self._check_timer = self._loop.call_later(POLL_INTERVAL_S, self._check)
        self._post(ProcessStarted(process_id, child.pid))

    def send(self, process_id: int, message: PipeToWorker) -> None:
        """Write to the process's pipe; the message is dropped if the process has exited.

        A process whose pipe cannot be written is killed.
        """
        child = self._children.get(process_id)
        if child is None or child.exited:
            return
        if isinstance(message, Announce):
            child.place = message.assignment
        try:
            child.pipe.send(message)
        except ElasticError as error:
            kind = type(message).__name__
            log.error("process_unreachable process=%d message=%s", process_id, kind)
            self.kill(process_id, str(error))

    def open_log(self, process_id: int, assign: Assign) -> None:
        """From here on the process's output belongs to this worker."""
        child = self._children.get(process_id)
        if child is not None:
            child.assigned = True
            self._logs.assign(child.output, assign)

    def kill(self, process_id: int, reason: str) -> None:
        """Send SIGKILL to the process and its group; its exit is posted as any other."""
        if process_id in self._forking:
            self._forking[process_id].killed = reason
        child = self._children.get(process_id)
        if child is not None and not child.exited:
            log.info("process_killed process=%d pid=%d reason=%r", process_id, child.pid, reason)
            signal_group(child.pid)

    def show_stacks(self, process_id: int) -> None:
        """Make a worker write the stacks of all its threads to its output."""
        child = self._children.get(process_id)
        if child is not None and not child.exited:
            # To the process alone: its own children may not handle the signal.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, STACKS_SIGNAL)

    async def close(self, timeout_s: float) -> None:
        """Kill all processes and wait until they are gone.

        A process in uninterruptible sleep (a hung network disk) outlives the wait; it dies when
        the system call returns.
        """
        self._has_zygote = False
        if self._zygote is not None:
            self._zygote.close()
            self._unreaped.append(self._zygote)
        for ends in self._forking.values():
            ends.close()  # A process forked now finds its pipe closed, and exits.
        self._forking.clear()
        for child in self._children.values():
            signal_group(child.pid)
        try:
            await asyncio.wait_for(self._all_gone.wait(), timeout_s)
        except asyncio.TimeoutError:
            left = ",".join(str(child.pid) for child in self._children.values())
            log.error("processes_left pids=%s after_s=%g", left, timeout_s)
        if self._check_timer is not None:
            self._check_timer.cancel()
        deadline = self._loop.time() + timeout_s
        while not self._reap_zygotes():
            if self._loop.time() >= deadline:
                break
            await asyncio.sleep(END_PAUSE_S)

    # ------------------------------------------------------------------------ start and end

    def _fork(self, request: SpareRequest) -> bool:
        """Request a spare from the zygote, started if needed; False if the request failed."""
        try:
            zygote = self._zygote = self._zygote or self._start_zygote()
            with self._ends() as (ends, theirs, output):
                zygote.request(request, theirs, output)
        except OSError as error:
            log.warning("zygote_unusable error=%r: spares take longer to start", str(error))
            return False
        self._forking[request.number] = ends
        return True

    def _start_zygote(self) -> Zygote:
        reading, writing = output_pipe()
        try:
            zygote = Zygote(
                self._launch.zygote, self._launch.env,
                output=writing, on_forked=self._forked, on_gone=self._zygote_gone,
            )  # fmt: skip
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._logs.copy_spare(reading)
        return zygote

    def _forked(self, process_id: int, pid: int) -> None:
        ends = self._forking.pop(process_id)
        if pid < 0:
            ends.close()
            self._post(SpawnFailed(process_id, f"cannot fork a worker: {os.strerror(-pid)}"))
            return
        self._has_forked = True
        self._begin(process_id, pid, ends)
        if ends.killed:
            self.kill(process_id, ends.killed)

    def _zygote_gone(self) -> None:
        """Start its unanswered spares anew, by another zygote unless this one never worked."""
        lost, self._zygote = self._zygote, None
        if lost is not None:
            self._unreaped.append(lost)
            self._zygote_losses = 0 if lost.has_forked else self._zygote_losses + 1
            # Where none has ever forked its imports fail, and would again.
            self._has_zygote = self._has_forked and self._zygote_losses < ZYGOTE_LOSSES_MAX
        forking, self._forking = self._forking, {}
        for process_id, ends in forking.items():
            ends.close()
            self.spawn(process_id)
            if ends.killed:
                self.kill(process_id, ends.killed)

    def _reap_zygotes(self) -> bool:
        """Reap the zygotes that have ended; return whether none of the lost ones is left."""
        self._unreaped = [zygote for zygote in self._unreaped if not zygote.is_gone()]
        return not self._unreaped

    @contextlib.contextmanager
    def _ends(self) -> Iterator[tuple[ParentEnds, socket.socket, int]]:
        """Make a socket pair and an output pipe; yields our ends of both, and the process's two.

        The process's ends are closed afterwards, ours too if the block raises OSError.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            reading, writing = output_pipe()
        except OSError:
            mine.close()
            theirs.close()
            raise
        ends = ParentEnds(mine, reading)
        try:
            yield ends, theirs, writing
        except OSError:
            ends.close()
            raise
        finally:
            theirs.close()
            os.close(writing)

    def _start(self, process_id: int) -> tuple[int, ParentEnds]:
        with self._ends() as (ends, theirs, output):
            popen = subprocess.Popen(
                [*self._launch.command, "--pipe-fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self._launch.env),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        popen.returncode = 0  # Only this module waits for it: Popen must not.
        log.debug("process_started process=%d pid=%d", process_id, popen.pid)
        return popen.pid, ends

    def _watch(self, child: Child) -> None:
        """Call `_died` when the process is dead, before it is reaped."""
        try:
            pidfd = os.pidfd_open(child.pid)
        except (AttributeError, OSError) as error:
            log.debug("no_pidfd pid=%d error=%r", child.pid, str(error))
            threading.Thread(
                target=self._wait_in_thread, args=(child,), name=f"wait-{child.pid}", daemon=True
            ).start()
            return

        def readable() -> None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            self._died(child)

        self._loop.add_reader(pidfd, readable)

    def _wait_in_thread(self, child: Child) -> None:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        self._loop.call_soon_threadsafe(self._died, child)

    def _died(self, child: Child) -> None:
        task = asyncio.ensure_future(self._reap(child))
        self._burials.append(task)
        task.add_done_callback(self._burials.remove)

    async def _reap(self, child: Child) -> None:
        """Read a zombie's last messages, report its exit, kill the rest of its session, reap it."""
        status = status_of_zombie(child.pid)
        signal_group(child.pid)
        # All its messages are in the socket now. Do not wait for the end of the stream: a child of
        # it that dies slowly holds the other end as well.
        listener = child.listener
        while listener and not listener.done() and readable(child.end):  # noqa: ASYNC110
            await asyncio.sleep(0)  # The listener reads at every turn of the loop.
        child.output.drain()
        child.exited = True
        child.pipe.close()
        # A spare has no log of a worker, so the exit carries its last line of output.
        last_line = "" if child.assigned else child.output.last_line()
        self._post(
            ProcessExited(child.process_id, exit_cause(status, self._memory_kills, last_line))
        )
        for _ in range(SWEEPS_MAX):
            left = await self._loop.run_in_executor(None, session_members, child.pid)
            if not left:
                break
            log.info("session_swept pid=%d left=%s", child.pid, ",".join(map(str, left)))
            for pid in left:
                kill_quietly(pid)
        reap(child.pid)
        del self._children[child.process_id]
        if not self._children:
            self._all_gone.set()

    # ------------------------------------------------------------------------ what they do

    async def _listen(self, child: Child) -> None:
        """Post the process's messages; kill it if one is malformed."""
        try:
            async for message in child.pipe:
                if isinstance(message, WorkerUpdate):
                    _take_place(child, message.report)
                self._post(ProcessMessageReceived(child.process_id, message))
        except PeerError as error:
            # A process that died in the middle of a message is reported by its exit.
            if process_state(child.pid) not in DEAD:
                log.error(
                    "process_spoke_nonsense process=%d error=%r", child.process_id, str(error)
                )
                self.kill(child.process_id, str(error))

    def _check(self) -> None:
        """Poll all process states, and post each process that was stopped or resumed."""
        self._check_timer = None
        for child in self._children.values():
            if child.exited:
                continue
            stopped = process_state(child.pid) == "T"
            if stopped != child.stopped:
                child.stopped = stopped
                self._post(ProcessStopped(child.process_id, stopped))
        self._reap_zygotes()
        if self._launch.zygote and not self._forking:
            # Not during a fork: the new process's exit must be reported, and its pid stay taken.
            zygotes = {zygote.pid for zygote in (self._zygote, *self._unreaped) if zygote}
            known = {*zygotes, *(child.pid for child in self._children.values())}
            reap_adopted(known.__contains__)
        if self._children:
            self._check_timer = self._loop.call_later(POLL_INTERVAL_S, self._check)
