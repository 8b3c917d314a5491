"""A cluster of real processes on loopback, for fault injection in tests, demos and benchmarks.

    with LocalCluster(nodes=3) as cluster:
        job = cluster.submit(spec)
        cluster.wait(job, lambda view: view.record.generation == 1)
        cluster.kill_node("n1")

Each node is one `elastic-agent` with its workers. `kill_node` kills agent and workers at once, as
when a machine fails. No process outlives the `with` block or the process that it is in: all end
when a pipe from it closes. A process that is stopped (SIGSTOP) ends when it is continued.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from elastic.client.jobs import Client
from elastic.core.config import JobSpec
from elastic.core.events.shared import Note
from elastic.core.facts import NodePhase
from elastic.core.view import ClusterView, JobView
from elastic.errors import ElasticError, Refused, Unavailable
from elastic.runtime.access import find_access
from elastic.runtime.eventlog import for_owner
from elastic.runtime.ready import address_in
from elastic.wire.codec_jobs import TimedNote

TIMEOUT_S = 60.0
TIMEOUT_S_MAX = 600.0
POLL_S = 0.01
POLL_S_MAX = 0.2

COORDINATOR = "coordinator"
"""Name of the coordinator's log and of its certificate."""


class LocalCluster:
    """A coordinator and agents on this machine.

    Attributes:
        directory: logs and stores; deleted at the end unless it was given.
        address: "host:port" of the coordinator, the same after a restart.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        workers_per_node: int = 1,
        spares: int = 1,
        store: str = "",
        directory: str | Path | None = None,
        token_file: str | Path | None = None,
        tls_dir: str | Path | None = None,
        coordinator_args: tuple[str, ...] = (),
    ) -> None:
        """Configure a cluster; `start` or `with` starts it.

        Args:
            nodes: number of agents, named n1, n2, ...
            workers_per_node: slots per agent.
            spares: warm spare processes per agent.
            store: membership store; "" for SQLite in the directory.
            directory: directory of the logs, None for a temporary one.
            token_file: file of the join token that all must present, None for no token.
            tls_dir: authority that has issued certificates to "coordinator" (which this client
                uses too) and to each node; None for plaintext.
            coordinator_args: further arguments of `elastic-coord serve`.
        """
        self._is_temporary = directory is None
        self.directory = Path(directory or tempfile.mkdtemp(prefix="elastic-cluster-"))
        self.num_nodes = nodes
        self.workers_per_node = workers_per_node
        self.spares = spares
        self.store = store or f"sqlite:{self.directory / 'coordinator.sqlite'}"
        self.token_file = str(token_file) if token_file is not None else ""
        self.tls_dir = Path(tls_dir) if tls_dir is not None else None
        self.coordinator_args = coordinator_args
        self.address = ""
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        # (theirs, ours): nothing is written; it closes with this process, however that ends.
        self._tether: tuple[int, int] | None = None
        self._collected = _Notes()

    def __enter__(self) -> LocalCluster:
        """Start the cluster; on return all nodes are registered."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the cluster; after an exception, keep the logs and print their path."""
        self.stop(keep=error is not None)
        if error is not None:
            print(f"logs of the cluster: {self.directory}", file=sys.stderr)

    # ------------------------------------------------------------ up and down

    def start(self) -> None:
        """Start the coordinator and all agents, and wait until they are registered."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.start_coordinator()
        for index in range(self.num_nodes):
            self.start_node(f"n{index + 1}")
        self.wait_nodes(self.num_nodes)

    def start_coordinator(self) -> None:
        """Start the coordinator; after a kill it restarts at the same address."""
        ready = self.directory / "coordinator.ready"
        ready.unlink(missing_ok=True)
        self.coordinator = self._spawn(
            "coordinator", "elastic.coord.cli", "serve",
            "--listen", self.address or "127.0.0.1:0", "--store", self.store,
            "--ready-file", str(ready), *self._access_flags(COORDINATOR), *self.coordinator_args,
        )  # fmt: skip
        process = self.coordinator
        self._until(
            lambda: (
                bool(ready.exists() and ready.read_text().strip()) or process.poll() is not None
            ),
            "the coordinator to listen",
        )
        if process.poll() is not None:
            raise Unavailable(f"the coordinator ended: {self.log_of('coordinator')[-2000:]}")
        self.address = address_in(ready.read_text())

    def kill_coordinator(self) -> None:
        """Kill the coordinator with SIGKILL, and wait for its end."""
        if self.coordinator is not None:
            self.coordinator.kill()
            self.coordinator.wait()

    def start_node(self, name: str, *args: str, module: str = "elastic.agent.cli") -> None:
        """Start an agent with this node id; `module` may be a test's faulty variant."""
        self.agents[name] = self._spawn(
            name, module, "--coord", self.address, "--node-id", name,
            "--workers", str(self.workers_per_node), "--spares", str(self.spares),
            "--notices", "none",
            "--run-dir", str(self.directory / "run"), "--log-dir", str(self.directory / "logs"),
            *self._access_flags(name), *args,
        )  # fmt: skip

    def kill_node(self, name: str) -> None:
        """Simulate a machine failure: SIGKILL the agent and all its descendants at once."""
        agent = self.agents[name]
        victims = [agent.pid, *descendants(agent.pid)]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def stop_node(self, name: str, *, stopped: bool = True) -> None:
        """Freeze a machine: SIGSTOP (or SIGCONT) the agent and all its descendants."""
        # The agent stops first and continues last: it must not see its workers stopped.
        victims = [self.agents[name].pid, *descendants(self.agents[name].pid)]
        for pid in victims if stopped else reversed(victims):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    def signal_node(self, name: str, number: int) -> None:
        """Send a signal to an agent alone, such as SIGTERM for a drain."""
        os.kill(self.agents[name].pid, number)

    def stop_jobs(self) -> None:
        """Stop every job at once, without saving, and wait until none has a worker."""
        for left in self.client.list(include_ended=False):
            with contextlib.suppress(Refused):  # It has just ended by itself.
                self.client.stop(left.record.spec.job_id, "its test is over", now=True)
            self.wait(left.record.spec.job_id, lambda view: not view.workers, "the end")

    def stop(self, *, keep: bool = False) -> None:
        """End all processes; keep the directory if `keep`."""
        if self._client is not None:
            self._client.close()
        for agent in self.agents.values():
            if agent.poll() is None:
                for pid in [agent.pid, *descendants(agent.pid)]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                agent.wait()
        self.kill_coordinator()
        tether, self._tether = self._tether, None
        for fd in tether or ():
            os.close(fd)
        self._collected.join()
        if self._is_temporary and not keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _access_flags(self, name: str) -> tuple[str, ...]:
        token = ("--token-file", self.token_file) if self.token_file else ()
        return (*token, "--tls-dir", self._tls_of(name)) if self.tls_dir is not None else token

    def _tls_of(self, name: str) -> str:
        return str(self.tls_dir / name) if self.tls_dir is not None else ""

    def _spawn(self, name: str, module: str, *args: str) -> subprocess.Popen[bytes]:
        if self._tether is None:
            self._tether = os.pipe()
        theirs = self._tether[0]
        with open(self.directory / f"{name}.log", "ab", opener=for_owner) as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *args, "--tether-fd", str(theirs)],
                pass_fds=(theirs,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # The nodes share this machine's cores: one thread each avoids contention.
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
            )

    # ------------------------------------------------------------ reading and waiting

    @property
    def client(self) -> Client:
        """Return a client of the coordinator."""
        if self._client is None:
            access = find_access(self.token_file, tls_dir=self._tls_of(COORDINATOR))
            self._client = Client(self.address, access)
        return self._client

    @property
    def notes(self) -> list[TimedNote]:
        """Return all notes of submitted jobs, oldest first."""
        return self._collected.notes

    def view(self) -> ClusterView:
        """Return the coordinator's current view of the cluster."""
        return self.client.status().view

    def submit(self, spec: JobSpec) -> str:
        """Submit a job and start to collect its notes."""
        job_id = self.client.submit(spec)
        self._collected.collect(self.client, job_id)
        return job_id

    def job(self, job_id: str) -> JobView:
        """Return the current view of one job."""
        return self.client.get(job_id)

    def wait(
        self, job_id: str, condition: Callable[[JobView], bool], what: str = "a condition"
    ) -> JobView:
        """Wait until the job's view meets the condition.

        Raises:
            Unavailable: nothing of the job changed for a minute, or it took over ten minutes; the
                text has the job's state.
        """
        found: list[JobView] = []

        def holds() -> bool:
            with contextlib.suppress(Unavailable):
                view = self.job(job_id)
                found[:] = [view]
                return condition(view)
            return False

        def story() -> str:
            view = found[-1] if found else None
            return f"{view.record.phase.value}: {view.reason}" if view else "never seen"

        def moved() -> object:
            if not found:
                return None
            record, steps = found[-1].record, [worker.steps for worker in found[-1].workers]
            return record.phase, record.generation, steps

        self._until(holds, f"{what} of job {job_id}", story, moved)
        return found[-1]

    def wait_nodes(self, count: int, *, restart: bool = False) -> None:
        """Wait until so many nodes are ready; with `restart`, restart those that end meanwhile."""

        def holds() -> bool:
            for name, agent in [*self.agents.items()] if restart else []:
                if agent.poll() is not None:
                    self.start_node(name)
            with contextlib.suppress(ElasticError):
                ready = [n for n in self.view().nodes if n.phase is NodePhase.READY]
                return len(ready) >= count
            return False

        self._until(holds, f"{count} nodes to register")

    def wait_note(
        self, name: str, job_id: str = "", *, after: int = 0, **fields: object
    ) -> TimedNote:
        """Wait for a note of a watched job that has these fields.

        Args:
            name: such as "group_formed".
            job_id: "" for any.
            after: search only from this index of `notes` on.
            fields: values that the note must have, compared as text.
        """
        wanted = {key: str(value) for key, value in fields.items()}

        def fits(note: Note) -> bool:
            noted = dict(note.fields)
            return (
                note.name == name
                and (not job_id or note.job_id == job_id)
                and all(noted.get(key) == value for key, value in wanted.items())
            )

        return self._collected.wait(fits, f"{name} {wanted}", after)

    def worker_pids(self, job_id: str) -> dict[str, int]:
        """Return the pid of each living worker of a job."""
        return {str(w.report.worker_id): w.report.pid for w in self.job(job_id).workers}

    def log_of(self, name: str) -> str:
        """Return the output of the coordinator or of a node's agent, "" if there is none."""
        path = self.directory / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _until(
        self,
        holds: Callable[[], bool],
        what: str,
        story: Callable[[], str] = lambda: "",
        moved: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait until `holds()`; the timeout restarts while the value of `moved` changes."""
        began = since = asked = time.monotonic()
        last = moved()
        while not holds():
            now, seen = time.monotonic(), moved()
            if seen != last:
                since, last = now, seen
            if now - since > TIMEOUT_S or now - began > TIMEOUT_S_MAX:
                raise Unavailable(f"waited {now - began:.0f} s for {what} {story()}".strip())
            # At most a tenth of the time: the cluster needs the cores more than its observer.
            time.sleep(max(POLL_S, min(POLL_S_MAX, 9 * (now - asked))))
            asked = time.monotonic()


class _Notes:
    """The notes of watched jobs, oldest first; a thread for each job reads them."""

    def __init__(self) -> None:
        self.notes: list[TimedNote] = []
        self._watchers: list[threading.Thread] = []
        self._changed = threading.Condition()

    def collect(self, client: Client, job_id: str) -> None:
        watcher = threading.Thread(target=self._watch, args=(client, job_id), daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def _watch(self, client: Client, job_id: str) -> None:
        with contextlib.suppress(ElasticError):
            for event in client.watch(job_id):
                if isinstance(event, TimedNote):
                    with self._changed:
                        self.notes.append(event)
                        self._changed.notify_all()

    def wait(self, fits: Callable[[Note], bool], what: str, after: int) -> TimedNote:
        def found() -> TimedNote | None:
            return next((timed for timed in self.notes[after:] if fits(timed.note)), None)

        with self._changed:
            timed = self._changed.wait_for(found, TIMEOUT_S)
            if timed is None:
                seen = [timed.note.name for timed in self.notes[after:]][-20:]
                raise Unavailable(f"no note {what} came; the last were: {seen}")
            return timed

    def join(self) -> None:
        for watcher in self._watchers:
            watcher.join(TIMEOUT_S)


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process, each parent before its children."""
    found = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> Iterator[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                yield int(child)


def start_of(pid: int) -> str:
    """Return a process's start time in kernel ticks; "" if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    return bool(start_of(pid))
