"""The embedded store's file: killed processes, damage, other programs, full disks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from elastic.errors import CorruptRecord, StoreError, UsageError
from elastic.store.interface import Compare, Put
from elastic.store.sqlite import SqliteStore, sqlite_store
from tests.patience import DEADLINE_S

# Tests wait for the processes that they start; nothing else runs on their loop meanwhile.
# ruff: noqa: ASYNC220, ASYNC221, ASYNC240

pytestmark = pytest.mark.anyio

# Counts in "n" and tells each count once it is durable.
WRITER = """
import asyncio, sys
from pathlib import Path
from elastic.store.interface import Compare, Put
from elastic.store.sqlite import sqlite_store

async def main():
    store = await sqlite_store(Path(sys.argv[1]))
    entries = (await store.read("n")).entries
    number, revision = (int(entries[0].value), entries[0].mod_revision) if entries else (0, 0)
    while True:
        number += 1
        writes = [Put("n", b"%d" % number), Put(f"log/{number:06}", b"x" * 2000)]
        revision = (await store.commit([Compare("n", revision)], writes)).revision
        print(number, revision, flush=True)

asyncio.run(main())
"""
# Commits until the file may not grow any more, then a bit further, then with room again.
FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from elastic.errors import StoreUnavailable
from elastic.store.interface import Compare, Put
from elastic.store.sqlite import sqlite_store

async def main():
    store = await sqlite_store(Path(sys.argv[1]))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    revision = 0
    for number in range(100):
        try:
            value = bytes([number]) * 50_000
            result = await store.commit([Compare("k", revision)], [Put("k", value)])
        except StoreUnavailable as error:
            print(error)
            break
        revision = result.revision
    (entry,) = (await store.read("k")).entries
    assert entry.mod_revision == revision, (entry.mod_revision, revision)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    result = await store.commit([Compare("k", revision)], [Put("k", b"room")])
    assert result.committed and result.revision == revision + 1
    await store.close()

asyncio.run(main())
"""


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[SqliteStore]:
    store = await sqlite_store(path)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coord.db"


async def filled(path: Path, number: int) -> None:
    async with opened(path) as store:
        for index in range(number):
            key = f"k{index:03}"
            assert (await store.commit([Compare(key, 0)], [Put(key, key.encode() * 50)])).committed


# -------------------------------------------------------------------------------------- durability


async def test_what_a_process_was_told_is_durable_survives_its_sigkill(path: Path) -> None:
    told: list[tuple[int, int]] = []
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            before = len(told)
            while len(told) < before + 40:
                line = writer.stdout.readline().split()
                told.append((int(line[0]), int(line[1])))
            # In the middle of whatever it does now.
            writer.send_signal(signal.SIGKILL)
            # Its last line may be cut off.
            rest = [line.split() for line in writer.stdout.read().split("\n")[:-1]]
            told += [(int(line[0]), int(line[1])) for line in rest]
        async with opened(path) as store:
            snapshot = await store.read("")
            entries = {entry.key: entry for entry in snapshot.entries}
            count = int(entries["n"].value)
            last, last_revision = told[-1]
            # At most the one commit that was under way is there without our being told.
            assert last <= count <= last + 1
            assert entries["n"].mod_revision - last_revision == count - last
            assert snapshot.revision == entries["n"].mod_revision
            # Whole commits: each wrote both keys.
            names = [f"log/{number:06}" for number in range(1, count + 1)]
            assert [key for key in entries if key != "n"] == names
            for number, revision in told:
                assert entries[f"log/{number:06}"].mod_revision == revision
            if count > last:
                told.append((count, entries["n"].mod_revision))


async def test_a_full_disk_is_reported_and_writing_goes_on_when_there_is_room(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(path) in done.stdout
    assert "free space" in done.stdout
    async with opened(path) as store:
        assert (await store.read("k")).entries[0].value == b"room"


# ----------------------------------------------------------------------------------- one process


async def test_a_second_opener_is_told_who_has_the_file(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(UsageError) as refused:
            await sqlite_store(path)
        assert str(path) in str(refused.value)
        assert f"pid {writer.pid}" in str(refused.value)
        writer.kill()
    # Its death gives the file free.
    async with opened(path) as store:
        with pytest.raises(UsageError, match=f"pid {os.getpid()}"):
            await sqlite_store(path)
        assert (await store.read("n")).entries
    async with opened(path):
        pass


async def test_the_file_is_for_its_owner_only(path: Path) -> None:
    async with opened(path) as store:
        await store.commit([Compare("k", 0)], [Put("k", b"secret")])
        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    names = ("coord.db", "coord.db-wal", "coord.db-shm", "coord.db.lock", "coord.db.revision")
    assert modes == dict.fromkeys(names, 0o600)


async def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    async with opened(tmp_path / "new" / "folder" / "coord.db") as store:
        assert (await store.read("")).entries == ()


# ------------------------------------------------------------------------------- what is refused


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("my holiday in spring\n" * 500)


def torn(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        for page in range(2, path.stat().st_size // 4096, 3):
            file.seek(page * 4096)
            file.write(b"\xaa" * 4096)


def without_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * 100)


def unindexed(path: Path) -> None:
    """Flip one bit of a key in the index by which rows are found; its row stays as it was."""
    content = bytearray(path.read_bytes())
    pages = range(0, len(content), 4096)
    # 0x0a: a leaf of an index.
    page = next(p for p in pages if content[p] == 0x0A and b"k001" in content[p : p + 4096])
    content[content.index(b"k001", page)] ^= 1
    path.write_bytes(content)


async def killed(path: Path, count: int) -> int:
    """Leave a store as a SIGKILL of its process does; return how many commits it was told of."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        told = 0
        while told < count:
            told = int(writer.stdout.readline().split()[0])
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split("\n")[:-1]
    return int(rest[-1].split()[0]) if rest else told


async def test_no_damage_of_any_file_takes_back_in_silence_what_was_acknowledged(
    path: Path, tmp_path: Path
) -> None:
    """One bit anywhere, a file cut, emptied or gone: noticed, or everything is there."""
    told = await killed(path, 12)
    whole = {f: f.read_bytes() for f in path.parent.iterdir() if f.suffix != ".db-shm"}
    wal, mark = path.with_name("coord.db-wal"), path.with_name("coord.db.revision")
    dice, harms = random.Random(3), []
    for file in (wal, path, mark):
        for _ in range(25):
            content = bytearray(whole[file])
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
            harms.append((file, bytes(content)))
        harms += [(file, whole[file][: len(whole[file]) * part // 10]) for part in (0, 5, 9)]
    harms += [(wal, None), (path, None)]
    reasons = []
    for file, content in harms:
        for one in path.parent.iterdir():
            one.unlink()
        for one, was in whole.items():
            one.write_bytes(was)
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        before = {f: f.read_bytes() for f in whole if f.exists()}
        try:
            async with opened(path) as store:
                snapshot = await store.read("")
                assert len(snapshot.entries) - 1 >= told, (file.name, len(content or b""))
        except StoreError as error:
            reasons.append(str(error))
            after = {f: f.read_bytes() for f in before if f.suffix != ".lock"}
            assert after == {f: b for f, b in before.items() if f.suffix != ".lock"}
    assert len(reasons) > 40
    assert all(str(path) in reason for reason in reasons)


@pytest.mark.parametrize("damage", [text, torn, overwritten, without_header, unindexed])
async def test_a_damaged_file_is_refused_by_its_path(path: Path, damage: object) -> None:
    await filled(path, 200)
    assert callable(damage)
    damage(path)
    content = path.read_bytes()
    with pytest.raises(CorruptRecord) as refused:
        await sqlite_store(path)
    assert str(path) in str(refused.value)
    assert "move the file away" in str(refused.value)
    # Nothing was repaired, and the lock was given back.
    assert path.read_bytes() == content
    with pytest.raises(CorruptRecord):
        await sqlite_store(path)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET value = x'00' WHERE key = CAST('k001' AS BLOB)",
        "UPDATE entries SET value = CAST(x'ff' AS TEXT) WHERE key = CAST('k001' AS BLOB)",
        "UPDATE entries SET mod_revision = 2 WHERE key = CAST('k001' AS BLOB)",
        "UPDATE entries SET mod_revision = 'two' WHERE key = CAST('k001' AS BLOB)",
        "UPDATE entries SET key = CAST('k001x' AS BLOB) WHERE key = CAST('k001' AS BLOB)",
    ],
)
async def test_a_record_that_is_not_what_was_written_is_refused_by_its_key(
    path: Path, statement: str
) -> None:
    await filled(path, 3)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute(statement).rowcount == 1
        database.commit()
    async with opened(path) as store:
        with pytest.raises(CorruptRecord, match=r"key 'k001x?'"):
            await store.read("k")
        assert len((await store.read("k002")).entries) == 1


async def test_a_table_of_other_columns_is_damage_and_no_fault_that_passes(path: Path) -> None:
    await filled(path, 1)
    with closing(sqlite3.connect(path)) as database:
        database.execute("ALTER TABLE entries RENAME COLUMN value TO vamue")
    async with opened(path) as store:
        with pytest.raises(CorruptRecord, match=f"{path} is damaged"):
            await store.read("k")


async def test_a_file_that_lost_its_numbers_is_refused(path: Path) -> None:
    await filled(path, 1)
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM numbers WHERE name = 'revision'")
        database.commit()
    with pytest.raises(CorruptRecord, match="revision"):
        await sqlite_store(path)


async def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE songs (title TEXT)")
        database.commit()
    content = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        await sqlite_store(path)
    assert path.read_bytes() == content


async def test_a_newer_schema_is_refused_with_what_to_do(path: Path) -> None:
    await filled(path, 1)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match=r"schema 99.*install the version"):
        await sqlite_store(path)


async def test_an_empty_file_is_a_new_store(path: Path) -> None:
    emptied(path)
    async with opened(path) as store:
        assert (await store.read("")).entries == ()


async def test_a_path_that_can_be_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "file" / "coord.db"):
        with pytest.raises(UsageError, match="cannot be opened"):
            await sqlite_store(path)


# ---------------------------------------------------------------------------------- the event loop


async def test_the_event_loop_runs_on_while_the_disk_is_slow(path: Path) -> None:
    async with opened(path) as store:
        with closing(sqlite3.connect(path, isolation_level=None)) as somebody:
            # Another program that holds SQLite's own lock stands for a disk that hangs.
            somebody.execute("BEGIN IMMEDIATE")
            commit = asyncio.ensure_future(store.commit([Compare("k", 0)], [Put("k", b"")]))
            begun = time.monotonic()
            turns = 0
            while time.monotonic() - begun < 0.2:
                await anyio.lowlevel.checkpoint()
                turns += 1
            assert turns > 100
            assert not commit.done()
            somebody.execute("ROLLBACK")
        with anyio.fail_after(DEADLINE_S):
            assert (await commit).committed


async def test_a_commit_whose_caller_did_not_wait_takes_place(path: Path) -> None:
    async with opened(path) as store:
        with closing(sqlite3.connect(path, isolation_level=None)) as somebody:
            somebody.execute("BEGIN IMMEDIATE")
            commit = asyncio.ensure_future(store.commit([Compare("k", 0)], [Put("k", b"")]))
            await anyio.wait_all_tasks_blocked()
            commit.cancel()
            with pytest.raises(asyncio.CancelledError):
                await commit
            somebody.execute("ROLLBACK")
        assert [entry.key for entry in (await store.read("")).entries] == ["k"]
