"""etcd members, coordinators and agents, each on a host of its own, and what can befall them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from elastic.client.jobs import Client
from elastic.core.facts import NodePhase
from elastic.errors import ElasticError
from elastic.testing.local_cluster import descendants
from elastic.wire.codec_jobs import ClusterStatus
from tests.chaos.net.switch import CUT, Switch
from tests.etcd_server import LAUNCH, find_etcd
from tests.patience import DEADLINE_S

MEMBERS = ("m1", "m2", "m3")
COORDINATORS = ("c1", "c2")
AGENTS = ("n1", "n2")


class NetCluster:
    """Everything on hosts of its own; a context manager."""

    def __init__(
        self,
        directory: Path,
        switch: Switch | None = None,
        *,
        agents: tuple[str, ...] = AGENTS,
        spares: int = 0,
    ) -> None:
        self.directory = directory
        self.agents = agents
        self.spares = spares
        self.switch = switch or Switch()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.client: Client

    def __enter__(self) -> NetCluster:
        try:
            for name in ("user", *MEMBERS, *COORDINATORS, *self.agents):
                self.switch.add(name)
            for name in MEMBERS:
                self.start_member(name)
            for name in COORDINATORS:
                self.start_coordinator(name)
            for name in self.agents:
                self.start_agent(name)
            self.client = Client([self.endpoint(name) for name in COORDINATORS])
            self.wait_nodes(len(self.agents))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.close()

    def close(self) -> None:
        """End every process and the network."""
        for process in self.processes.values():
            for pid in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        self.switch.close()

    # ------------------------------------------------------------ processes

    def address(self, name: str) -> str:
        return self.switch.hosts[name].address

    def endpoint(self, name: str) -> str:
        return f"{self.address(name)}:7070"

    def start_member(self, name: str) -> None:
        data = self.directory / name
        data.mkdir(exist_ok=True)
        here = f"http://{self.address(name)}"
        peers = ",".join(f"{member}=http://{self.address(member)}:2380" for member in MEMBERS)
        self._spawn(
            name, str(find_etcd()), "--name", name, "--data-dir", str(data / "etcd"),
            "--listen-client-urls", f"{here}:2379", "--advertise-client-urls", f"{here}:2379",
            "--listen-peer-urls", f"{here}:2380", "--initial-advertise-peer-urls", f"{here}:2380",
            "--initial-cluster", peers, "--initial-cluster-state", "new", "--log-level", "warn",
            "--logger", "zap",
        )  # fmt: skip

    def start_coordinator(self, name: str) -> None:
        members = ",".join(f"{self.address(member)}:2379" for member in MEMBERS)
        self._spawn(
            name, sys.executable, "-m", "elastic.coord.cli", "serve", "--insecure",
            "--listen", self.endpoint(name), "--store", f"etcd://{members}",
        )  # fmt: skip

    def start_agent(self, name: str) -> None:
        self._spawn(
            name, sys.executable, "-m", "elastic.agent.cli", "--node-id", name,
            "--coord", ",".join(self.endpoint(one) for one in COORDINATORS),
            "--workers", "1", "--spares", str(self.spares),
            "--run-dir", str(self.directory / "run" / name),
            "--log-dir", str(self.directory / "logs" / name),
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """SIGKILL, also to a frozen one."""
        self.processes[name].kill()
        self.processes[name].wait()

    def freeze(self, name: str, frozen: bool = True) -> None:
        """SIGSTOP or SIGCONT of all that runs on a host."""
        pids = [self.processes[name].pid, *descendants(self.processes[name].pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def _spawn(self, name: str, *command: str) -> None:
        # Ended by the kernel with this process; code of our own between fork and exec is not safe.
        launch = (sys.executable, "-S", "-E", "-c", LAUNCH, str(os.getpid()))
        inside = ("ip", "netns", "exec", self.switch.hosts[name].namespace)
        program = shutil.which(inside[0])
        assert program is not None, "no 'ip' here"
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*launch, program, *inside[1:], *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )

    # ------------------------------------------------------------ looking and waiting

    def leader(self) -> str:
        """The coordinator that answers for the cluster now."""
        return self.name_of(self.client.status())

    def name_of(self, status: ClusterStatus) -> str:
        host = status.coordinator.partition(":")[0]
        return next(name for name in COORDINATORS if self.address(name) == host)

    def standby(self) -> str:
        leader = self.leader()
        return next(name for name in COORDINATORS if name != leader)

    def wait_leader(self, among: tuple[str, ...] = COORDINATORS) -> float:
        """Wait until one of these leads; returns the seconds."""
        return self.wait_until(
            lambda: not (s := self.client.status()).standby and self.name_of(s) in among,
            f"one of {among} to lead",
        )

    def wait_nodes(self, count: int) -> float:
        """Wait until so many nodes are connected to the leader; returns the seconds."""

        def there() -> bool:
            nodes = self.client.status().view.nodes
            return sum(node.phase is NodePhase.READY for node in nodes) >= count

        return self.wait_until(there, f"{count} nodes")

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def wait_logged(self, name: str, text: str, times: int = 1) -> float:
        return self.wait_until(
            lambda: self.log(name).count(text) >= times, f"{text!r} in the log of {name}"
        )

    def wait_until(self, holds: Callable[[], bool], what: str) -> float:
        began = time.monotonic()
        error = ""
        while time.monotonic() - began < DEADLINE_S:
            try:
                if holds():
                    return time.monotonic() - began
            except ElasticError as failure:
                error = str(failure)
            time.sleep(0.02)
        raise AssertionError(f"waited {DEADLINE_S:g} s for {what}; {error}")

    # ------------------------------------------------------------ the network

    def cut_from_store(self, name: str) -> None:
        for member in MEMBERS:
            self.switch.set(name, member, CUT)

    def cut_from_agents(self, name: str) -> None:
        for agent in self.agents:
            self.switch.set(name, agent, CUT)
