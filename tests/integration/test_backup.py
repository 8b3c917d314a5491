"""`elastic-coord backup` and `restore`: whole copies, of one moment, that never overwrite."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from elastic.coord.backup import back_up, restore
from elastic.coord.cli import exit_code
from elastic.core.facts import JobPhase, WorkerPhase
from elastic.core.messages import StopWorker, Welcome
from elastic.errors import ElasticError
from elastic.store.sqlite import sqlite_store
from elastic.store.sqlite_mark import StoreMark
from tests.integration.coordinator import (
    Coordinator,
    ScriptedAgent,
    User,
    elastic_coord,
    node,
    spec,
)
from tests.patience import DEADLINE_S
from tests.unit.journal_under_test import PREFIX, checkpoints, leading_journal, record

pytestmark = pytest.mark.anyio


async def run(*args: str) -> tuple[int, str]:
    done = await anyio.to_thread.run_sync(lambda: elastic_coord(*args))
    return done.returncode, (done.stdout + done.stderr).strip()


async def test_running_jobs_are_adopted_from_a_copy_that_was_taken_while_they_ran(
    tmp_path: Path,
) -> None:
    copy, lost = tmp_path / "copy", tmp_path / "lost.sqlite"
    store = f"sqlite:{tmp_path / 'new.sqlite'}"
    with Coordinator(tmp_path / "c", store=f"sqlite:{lost}") as coordinator:
        async with (
            ScriptedAgent(coordinator.address, node("n1")) as agent,
            User(coordinator.address) as user,
        ):
            await agent.hello()
            before = await agent.hear(Welcome)
            job_id = await user.submit(spec("kept", payload=b"p" * 1_500_000))
            report = await agent.train()
            await user.wait_job(job_id, lambda job: job.record.phase is JobPhase.RUNNING)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(submit_many, user)
                code, said = await run("backup", str(copy), "--store", f"sqlite:{lost}")
                tasks.cancel_scope.cancel()
            assert (code, "jobs, revision" in said) == (0, True), said
        coordinator.kill()
    lost.unlink()
    assert (await run("restore", str(copy), "--store", store))[0] == 0
    with Coordinator(tmp_path / "d", store=store) as coordinator:
        async with (
            ScriptedAgent(coordinator.address, node("n1")) as agent,
            User(coordinator.address) as user,
        ):
            await agent.hello(replace(report, generation=1))
            after = await agent.hear(Welcome)
            adopted = await user.wait_job(job_id, lambda job: len(job.workers) == 1)
            assert adopted.record.generation == 1
            assert adopted.workers[0].report.phase is WorkerPhase.TRAINING
            assert not [m for m in agent.received if isinstance(m, StopWorker)]
    # Its terms are those of another store: an agent that met later ones of the lost one obeys.
    assert before.history != after.history != ""


async def submit_many(user: User) -> None:
    for number in range(1000):
        await user.submit(spec(f"more-{number}"))


async def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path: Path) -> None:
    store, copy = tmp_path / "s.sqlite", tmp_path / "copy"
    with Coordinator(tmp_path / "c", store=f"sqlite:{store}"):
        assert (await run("backup", str(copy), "--store", f"sqlite:{store}"))[0] == 0
        code, said = await run("backup", str(copy), "--store", f"sqlite:{store}")
        assert (code, said.split(": ", 1)[1]) == (
            78, f"{copy} exists already and is left as it is; name another file, or move it away",
        )  # fmt: skip
        code, said = await run("restore", str(copy), "--store", f"sqlite:{store}")
        assert (code, "is in use by the process with pid" in said) == (78, True), said
    code, said = await run("restore", str(copy), "--store", f"sqlite:{store}")
    assert (code, "exists already and is left as it is" in said) == (78, True), said
    assert not list(tmp_path.glob(".*"))  # noqa: ASYNC240


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good store, and files that are none."""
    folder = tmp_path_factory.mktemp("files")
    anyio.run(fill, folder)
    whole = (folder / "copy").read_bytes()
    (folder / "text").write_text("no database at all\n" * 100)
    (folder / "cut").write_bytes(whole[: len(whole) // 2])
    for name, change in (
        ("newer", "PRAGMA user_version=99"),
        ("text-in-it", "UPDATE entries SET value = value || x'00' WHERE instr(key, '/jobs/')"),
        ("flipped", "UPDATE entries SET value = zeroblob(9) WHERE instr(key, '/jobs/')"),
        ("lacking", "DELETE FROM entries WHERE instr(key, '/pieces/')"),
        ("other", "PRAGMA application_id=7"),
    ):
        (folder / name).write_bytes(whole)
        with contextlib.closing(sqlite3.connect(folder / name)) as database, database:
            database.execute(change)
    return folder


async def fill(folder: Path) -> None:
    store = await sqlite_store(folder / "good")
    job = record("j-1", checkpoints=checkpoints(2000))
    await (await leading_journal(store)).write([job])
    await store.close()
    copied = await back_up(f"sqlite:{folder / 'good'}", PREFIX, folder / "copy")
    assert (copied.jobs, copied.term) == (1, 1)


@pytest.mark.parametrize(
    ("name", "store", "told"),
    [
        ("", "sqlite:{files}/none", "does not exist"),
        ("", "etcd://127.0.0.1:1", "etcdctl snapshot save"),
        ("", "memory:", "expected sqlite:PATH"),
        ("", "sqlite:{files}/other", "no store of elastic-torch"),
        ("none", "sqlite:{tmp}/x", "does not exist"),
        ("text", "sqlite:{tmp}/x", "is damaged"),
        ("cut", "sqlite:{tmp}/x", "damaged"),
        ("newer", "sqlite:{tmp}/x", "/newer has schema 99"),
        ("flipped", "sqlite:{tmp}/x", "does not match its checksum"),
        ("text-in-it", "sqlite:{tmp}/x", "another program has written"),
        ("lacking", "sqlite:{tmp}/x", "0 of 1 pieces"),
        ("other", "sqlite:{tmp}/x", "no store of elastic-torch"),
        ("copy", "etcd://127.0.0.1:1", "etcdctl snapshot restore"),
        ("copy", "etcd://127.0.0.1:1", f"the key elastic/data/{PREFIX}/history,"),
        ("copy", "etcd://127.0.0.1:1/mine", f"the key mine/data/{PREFIX}/history,"),
    ],
)
async def test_what_cannot_be_copied_is_refused_with_what_to_do_and_writes_nothing(
    files: Path, tmp_path: Path, name: str, store: str, told: str
) -> None:
    url = store.format(files=files, tmp=tmp_path)
    copying = restore(files / name, url, PREFIX) if name else back_up(url, PREFIX, tmp_path / "x")
    with pytest.raises(ElasticError) as caught:
        await copying
    assert told in str(caught.value)
    assert exit_code(caught.value) == 78
    assert {path.name for path in tmp_path.iterdir()} <= {"x.lock"}  # noqa: ASYNC240


async def test_a_copy_holds_what_the_store_held_and_begins_another_history(
    files: Path, tmp_path: Path
) -> None:
    copied = await restore(files / "copy", f"sqlite:{tmp_path / 's'}", PREFIX)
    assert (copied.jobs, copied.term) == (1, 1)
    store, before = await sqlite_store(tmp_path / "s"), await sqlite_store(files / "good")
    was = await before.read(f"{PREFIX}/history")
    journal = await leading_journal(store, "b")
    assert await journal.load() == (record("j-1", checkpoints=checkpoints(2000)),)
    assert journal.term == 2
    assert journal.history.encode() != was.entries[0].value
    await store.close()
    await before.close()


def test_a_copy_that_finds_no_room_says_so_and_leaves_nothing_behind(
    files: Path, tmp_path: Path
) -> None:
    command = (sys.executable, "-m", "elastic.coord.cli", "backup", str(tmp_path / "x"))
    limit = ("sh", "-c", 'ulimit -f 100 && exec "$0" "$@"')
    limited = subprocess.run(
        [*limit, *command, "--store", f"sqlite:{files}/good"],
        capture_output=True, text=True, check=False, timeout=DEADLINE_S,
    )  # fmt: skip
    assert limited.returncode == 69
    assert f"{files}/good could not be copied into {tmp_path}" in limited.stderr
    assert "see that there is free space" in limited.stderr
    assert not list(tmp_path.iterdir())


def test_a_store_that_lacks_something_is_looked_into_and_salvaged_by_commands(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    anyio.run(fill, tmp_path)
    (tmp_path / "good").rename(path)
    (tmp_path / "good.revision").rename(tmp_path / "s.revision")
    store = ("--store", f"sqlite:{path}")
    sound = elastic_coord("store", "check", *store)
    assert (sound.returncode, "sound: " in sound.stdout) == (0, True), sound.stderr
    mark = StoreMark(path)
    mark.write(1000)
    mark.close()
    lacking = elastic_coord("store", "check", *store)
    assert lacking.returncode == 78
    assert "revision 1000 was acknowledged" in lacking.stderr
    assert "store salvage" in lacking.stderr
    salvaged = elastic_coord("store", "salvage", *store)
    assert salvaged.returncode == 0, salvaged.stderr
    assert "what is left: " in salvaged.stdout
    assert (tmp_path / "s.damaged-1").exists()
    assert elastic_coord("store", "check", *store).returncode == 0
