"""Clusters that a process starts for itself: they end with it, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.agent.cli import main as agent
from elastic.client import local_daemons
from elastic.client.embedded import NOT_FOR_US, ClusterConnection, stop_cluster
from elastic.client.local_daemons import StartedCluster, StartedDaemon, stop_started
from elastic.coord.cli import main as coordinator
from elastic.errors import Unavailable
from elastic.storage.run_record import RunOwner
from elastic.testing.local_cluster import is_running
from tests.integration.small_coordinator import free_port
from tests.patience import DEADLINE_S, wait_for

DRIVER = """
import signal, sys
from elastic.testing.local_cluster import LocalCluster
with LocalCluster(nodes=1, spares=1, directory=sys.argv[1]) as cluster:
    print(cluster.coordinator.pid, cluster.agents["n1"].pid, flush=True)
    signal.pause()
"""
DEAF = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""
DRAINS = """
import signal

def drain(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("told", flush=True)

signal.signal(signal.SIGTERM, drain)
print("ready", flush=True)
while True:
    signal.pause()
"""
HEEDS_CTRL_C = """
import signal
from elastic.client.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background has us ignore it.
main()
"""


def test_a_driver_that_is_killed_leaves_no_cluster_behind(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    with driver.stdout:
        pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.kill()
    driver.wait()
    try:
        wait_for(lambda: not any(map(is_running, pids)), f"{pids} go on")
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


STARTED = """
import signal
from elastic.client.embedded import start_cluster
print(start_cluster(1).directory, flush=True)
signal.pause()
"""


def test_a_script_that_is_killed_leaves_no_files_of_its_cluster_behind(tmp_path: Path) -> None:
    script = subprocess.Popen(
        [sys.executable, "-c", STARTED],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert script.stdout is not None
    with script.stdout:
        directory = Path(script.stdout.readline().strip())
    assert (directory / "agent.log").exists()
    script.kill()
    script.wait()
    wait_for(lambda: not directory.exists(), f"{directory} is still there")


@pytest.fixture
def listens_to_ctrl_c() -> Iterator[None]:
    """Shells start what they run in the background deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_whoever_presses_ctrl_c_again_leaves_nothing_behind_either(tmp_path: Path) -> None:
    directory = tmp_path / "cluster"
    directory.mkdir()
    deaf = subprocess.Popen(
        [sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert deaf.stdout is not None
    with deaf.stdout as said:
        assert said.readline() == "ready\n"

        def press() -> None:
            assert said.readline() == "told\n"
            os.kill(os.getpid(), signal.SIGINT)

        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            stop_cluster(ClusterConnection("", processes=[deaf], directory=directory))
        presser.join()
    assert deaf.returncode == -signal.SIGKILL
    assert not directory.exists()


CLOSED = "import os; os.close(0); os.close(1); "
FOREIGN = {
    "ELASTIC_STORE": "etcd://10.255.0.1:2379",
    "ELASTIC_STORE_CA": "/not/there.crt",
    "ELASTIC_HOST": "10.255.0.1",
    "ELASTIC_LABELS": "rack=7",
    "ELASTIC_TLS_DIR": "/not/there",
    "ELASTIC_TOKENS": "/not/there.json",
}


def test_neither_settings_of_another_cluster_nor_closed_streams_keep_one_from_starting() -> None:
    text = (
        f"{CLOSED}from elastic.client.embedded import start_cluster, stop_cluster; "
        "stop_cluster(start_cluster(1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, **FOREIGN},
    )
    assert done.returncode == 0, done.stderr


def test_no_variable_of_the_two_commands_is_forgotten() -> None:
    serve = coordinator.commands["serve"]
    named = {one.envvar for one in serve.params if one.envvar}
    named |= {f"ELASTIC_{one.name}".upper() for one in agent.params if one.name}
    # They are passed on the command line, or are meant for this one, too.
    assert named - NOT_FOR_US == {"ELASTIC_COORD", "ELASTIC_LOG_LEVEL"}


def test_a_machine_that_was_started_is_found_by_whoever_names_none(tmp_path: Path) -> None:
    here = {**os.environ, "TMPDIR": str(tmp_path)}
    here.pop("ELASTIC_COORD", None)

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], env=here, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    command = ("-m", "elastic.client.cli")
    where = ("--port", str(free_port()), "--node-ip-address", "127.0.0.1")
    started = (*command, "start", "--head", "--num-cpus", "3", *where)
    two = [
        subprocess.Popen(
            [sys.executable, *started], env=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        ends = [one.communicate(timeout=DEADLINE_S) for one in two]
        assert sorted(one.returncode for one in two) == [0, 78]
        assert b"runs here already" in max(err for _, err in ends)
        said = max(out for out, _ in ends).decode()
        assert "3/3" in run(*command, "status")
        (record,) = tmp_path.glob("elastic-*/started/started.json")
        killed = [one["process"]["pid"] for one in json.loads(record.read_text())["daemons"]]
        os.kill(killed[0], signal.SIGKILL)
        assert run(*started) == said
        now = [one["process"]["pid"] for one in json.loads(record.read_text())["daemons"]]
        assert now[0] != killed[0]
        assert now[1:] == killed[1:]
        wait_for(lambda: "3/3" in run(*command, "status"), "the agent to come back")
        address = said.split()[1]
        script = "import elastic; print(elastic.init('auto').address)"
        assert run("-c", script).strip() == address
    finally:
        run(*command, "stop")
    assert not list(tmp_path.glob("elastic-*/started/started.json"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [(("--store", "foo:"), "unknown kind 'foo'"), (("--labels", "foo"), "expected name=value")],
)
def test_a_machine_is_not_started_with_flags_that_a_daemon_refuses(
    flags: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    port = str(free_port())
    command = (sys.executable, "-m", "elastic.client.cli", "start", "--head", "--port", port)
    done = subprocess.run(
        [*command, "--node-ip-address", "127.0.0.1", *flags],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 78, done.stderr
    assert says in done.stderr
    assert not list(tmp_path.glob("elastic-*/started/started.json"))


def test_an_agent_whose_coordinator_is_gone_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(local_daemons, "PRINTED_AFTER_S", 0)
    drains = subprocess.Popen([sys.executable, "-c", DRAINS], stdout=subprocess.PIPE, text=True)
    assert drains.stdout is not None
    with drains.stdout as said:
        assert said.readline() == "ready\n"
        gone = replace(RunOwner.this_process(), began=1)
        node = StartedDaemon("agent", RunOwner.of(drains.pid), "")
        told = []

        def print_line(line: str) -> None:
            told.append(line)
            assert said.readline() == "told\n"

        cluster = StartedCluster("", "", (StartedDaemon("coordinator", gone, ""), node))
        assert stop_started(cluster, print_line=print_line) == (node,)
    assert drains.wait(DEADLINE_S) == -signal.SIGTERM
    assert told == [f"agent (pid {drains.pid}) ends its workers unsaved: their coordinator is gone"]


def test_what_was_there_stays_where_the_rest_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    local_daemons.folder().mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as old, subprocess.Popen(["sleep", "60"]) as new:
        try:
            node, head = (
                StartedDaemon(part, RunOwner.of(one.pid), "")
                for part, one in (("agent", old), ("coordinator", new))
            )
            there = StartedCluster("h:1", "", (node,))
            with contextlib.suppress(Unavailable), local_daemons._all_or_nothing(there):
                local_daemons._write(replace(there, daemons=(head, node)))
                raise Unavailable("it did not come up")
            assert local_daemons.find_started() == there
            assert new.wait(DEADLINE_S) == -signal.SIGKILL
            assert old.poll() is None
        finally:
            old.kill()
            new.kill()


def test_ctrl_c_while_a_head_starts_ends_what_was_started(tmp_path: Path) -> None:
    command = (sys.executable, "-c", HEEDS_CTRL_C, "start", "--head", "--num-cpus", "1")
    where = ("--port", str(free_port()), "--node-ip-address", "127.0.0.1")
    here = {**os.environ, "TMPDIR": str(tmp_path)}
    starting = subprocess.Popen([*command, *where], env=here)
    try:
        record = tmp_path / f"elastic-{os.getuid()}" / "started" / "started.json"
        wait_for(lambda: record.exists() and record.read_text().endswith("}"))
        (daemon, *_) = json.loads(record.read_text())["daemons"]
        os.kill(daemon["process"]["pid"], signal.SIGSTOP)  # So that it does not come up.
        starting.send_signal(signal.SIGINT)
        assert starting.wait(DEADLINE_S) == 130
    finally:
        starting.kill()
        starting.wait()
    assert not RunOwner(**daemon["process"]).is_other_and_alive()
    assert not record.exists()


def test_who_joins_a_coordinator_that_is_not_there_reads_what_is_waited_for(
    tmp_path: Path,
) -> None:
    where = f"127.0.0.1:{free_port()}"
    joining = subprocess.Popen(
        [sys.executable, "-c", HEEDS_CTRL_C, "start", "--address", where],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert joining.stderr is not None
    with joining.stderr as told:
        try:
            says = f"waits 60 s at most: no coordinator answers at {where}"
            assert told.readline().startswith(says)
            joining.send_signal(signal.SIGINT)
            assert joining.wait(DEADLINE_S) == 130
        finally:
            joining.kill()
            joining.wait()
    assert not list(tmp_path.glob("elastic-*/started/started.json"))
