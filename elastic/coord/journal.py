"""The journal: the coordinator's durable state, in the membership store.

Rule: every write is one transaction that compares the leader key and the last known revision
of each key it changes. If a comparison fails, another process leads, and this one ends.

Keys, under the prefix:

    jobs/JOB                   the job's record without the entry's payload, if it is small,
                               else "pieces:DIGEST:N"
    pieces/JOB/LABEL/I-of-N    parts of large values: LABEL is "entry" for the payload, else the
                               DIGEST of a record; an ended job has no payload
    nodes                      the durable state of nodes

Pieces are written before the record that needs them and are never changed, so an existing record
is complete. A payload may have megabytes, and a record is written at each generation. Because
they are separate, recovery from a loss needs only one small write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from elastic.coord.chunks import ENTRY, POINTER, StoredJob, join, label_of, pointed, puts_of
from elastic.coord.leadership import Leadership
from elastic.core.config import JobSpec
from elastic.core.facts import ENDED, JobId
from elastic.core.records import JobRecord, NodesRecord
from elastic.errors import CorruptRecord, Fenced, NotAuthorized, StoreUnavailable
from elastic.store.interface import CommitResult, Compare, Delete, Entry, Put, Store, Write
from elastic.wire.codec_records import decode_nodes, decode_record, encode_record

log = logging.getLogger(__name__)

RECORD_BYTES = 64 * 1024
"""A record above this is split, so that several fit into one transaction."""
DELETES_MAX = 100
POINTER_TRIES = 3


class Journal:
    """Records of jobs and of nodes, written by the leader only.

    After `StoreUnavailable` it is not known whether something was written: repeat it.

    Attributes:
        nodes: the nodes record that `load` read.
    """

    def __init__(self, store: Store, prefix: str, leadership: Leadership) -> None:
        """Read nothing yet; `load` comes first."""
        self._store = store
        self._jobs_prefix = f"{prefix}/jobs/"
        self._pieces_prefix = f"{prefix}/pieces/"
        self._nodes_key = f"{prefix}/nodes"
        self._nodes_revision = 0
        self.nodes = NodesRecord()
        self._leadership = leadership
        self._kept: dict[JobId, StoredJob] = {}
        self._unwanted: dict[JobId, None] = {}
        # Serialises the driver's writes and the concurrent upload of payloads.
        self._turn = asyncio.Lock()

    @property
    def term(self) -> int:
        """Return the number of this term on this store, from 1."""
        return max(1, self._leadership.term)

    @property
    def history(self) -> str:
        """Return the id of the store in which terms are counted."""
        return self._leadership.history

    def check_leader_state(self) -> None:
        """Check that this process may still act as the leader.

        Raises:
            Fenced: another coordinator may lead by now.
        """
        if not self._leadership.is_valid():
            raise self._leadership.fenced("it did not renew its lease in time")

    async def load(self) -> tuple[JobRecord, ...]:
        """Return all records by order of submission, and remember the existing keys.

        Raises:
            CorruptRecord: a record cannot be read; names the key.
        """
        # Pieces last: the leader that wrote them is gone, and wrote them before their record.
        entries = (await self._store.read(self._jobs_prefix)).entries
        pieces = (await self._store.read(self._pieces_prefix)).entries
        await self._load_nodes()
        self._kept, self._unwanted = {}, {}
        blobs = self._take_pieces(pieces)
        records = []
        for entry in entries:
            job_id = JobId(entry.key.removeprefix(self._jobs_prefix))
            data, label = entry.value, pointed(entry.value)
            if label:
                data = join(entry.key, label, blobs.get((job_id, label), ()))
            record = decode_record(data, key=entry.key)
            if record.spec.job_id != job_id:
                raise CorruptRecord(f"record {entry.key} is about job {record.spec.job_id!r}")
            needed = _needed(record, entry.value)
            parts = blobs.get((job_id, ENTRY), ()) if ENTRY in needed else ()
            payload = join(entry.key, ENTRY, parts, may_lack=True)
            records.append(replace(record, spec=_with_payload(record.spec, payload)))
            kept = self._kept.setdefault(job_id, StoredJob())
            kept.revision = entry.mod_revision
            kept.keep(needed)
        # Left by a coordinator that died before it wrote the record, or while removing it.
        for job_id, kept in self._kept.items():
            if not kept.revision:
                kept.keep(())
                self._unwanted[job_id] = None
        return tuple(sorted(records, key=lambda record: record.sequence))

    async def write(self, records: Iterable[JobRecord]) -> None:
        """Make these records durable, all or none, replacing those of the same jobs.

        Repeating a write whose reply was lost is safe.

        Raises:
            Fenced: another coordinator leads.
        """
        async with self._turn:
            await self._write(records)

    async def stage(
        self, job_id: JobId, payload: bytes, is_given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Write a payload before its job's first record, so that `write` need not.

        Other writes may happen between two pieces. This stops once the record is written, or
        once `write` has begun to write the payload itself; repeating it is safe.

        Args:
            job_id: of the future job.
            payload: its payload, not b"".
            is_given_up: whether the submission was abandoned, so that writing should stop.

        Raises:
            Fenced: another coordinator leads.
        """
        async with self._turn:
            if job_id in self._unwanted:
                await self._forget_one(job_id)
            kept = self._kept.setdefault(job_id, StoredJob())
            if kept.revision or ENTRY in kept.labels or kept.payload not in (b"", payload):
                return
            kept.payload = payload
            puts = puts_of(self._folder(job_id, ENTRY), payload)
            await self._expect(kept, ENTRY, puts)
        for number in range(len(puts) + 1):
            async with self._turn:
                mine = self._kept.get(job_id) is kept and kept.payload is payload
                if not mine or ENTRY in kept.labels or is_given_up():
                    return
                if number < len(puts):
                    await self._commit_fenced([puts[number]])
                else:
                    kept.has(ENTRY, puts)

    async def unstage(self, job_id: JobId) -> None:
        """Remove what `stage` wrote, unless the job has a record.

        Raises:
            Fenced: another coordinator leads.
        """
        async with self._turn:
            kept = self._kept.get(job_id)
            if kept is not None and not kept.revision:
                self._unwanted[job_id] = None
                await self._forget_unwanted()

    async def write_nodes(self, record: NodesRecord) -> None:
        """Make the nodes record durable, replacing the previous one; repeating it is safe.

        Raises:
            Fenced: another coordinator leads.
        """
        put = Put(self._nodes_key, encode_record(record))
        result = await self._commit_fenced([put], [Compare(put.key, self._nodes_revision)])
        revisions = {put.key: result.revision}
        if not result.committed:
            revisions = self._own_revisions([put], result.current)
        self._nodes_revision = revisions[put.key]

    async def _load_nodes(self) -> None:
        entry = await _read_nodes(self._store, self._nodes_key)
        if entry is not None:
            self.nodes = decode_nodes(entry.value, key=entry.key)
            self._nodes_revision = entry.mod_revision

    async def forget(self, job_ids: Iterable[JobId] = ()) -> None:
        """Remove these jobs, and those that an earlier call could not remove.

        Raises:
            Fenced: another coordinator leads.
        """
        async with self._turn:
            for job_id in job_ids:
                self._unwanted[job_id] = None
            await self._forget_unwanted()
            # Ended jobs have no later write that would retry the removal of leftover pieces.
            for job_id in [j for j, kept in self._kept.items() if kept.revision and kept.leftover]:
                await self._drop_leftover(job_id)

    async def _forget_unwanted(self) -> None:
        for job_id in tuple(self._unwanted):
            try:
                await self._forget_one(job_id)
            except (StoreUnavailable, NotAuthorized) as error:
                log.warning("forget_postponed job=%s error=%r", job_id, str(error))
                return

    async def _forget_one(self, job_id: JobId) -> None:
        kept = self._kept.get(job_id, StoredJob())
        await self._delete([self._jobs_prefix + job_id, *kept.keys()])
        self._kept.pop(job_id, None)
        del self._unwanted[job_id]

    async def _write(self, records: Iterable[JobRecord]) -> None:
        puts: dict[JobId, Put] = {}
        needed: dict[JobId, tuple[str, ...]] = {}
        compares: list[Compare] = []
        for record in records:
            job_id = record.spec.job_id
            if job_id in self._unwanted:
                # A reused id, as when a client repeats its request to the next leader: the keys
                # still stored under it belong to another job, and must be removed first.
                await self._forget_one(job_id)
            kept = self._kept.setdefault(job_id, StoredJob())
            if not kept.revision:
                await self._write_payload(job_id, record.spec.entry.payload)
            data = encode_record(replace(record, spec=_with_payload(record.spec, b"")))
            if len(data) > RECORD_BYTES:
                data = await self._split(job_id, data)
            puts[job_id] = Put(self._jobs_prefix + job_id, data)
            needed[job_id] = _needed(record, data)
            compares.append(Compare(puts[job_id].key, kept.revision))
        if not puts:
            return
        result = await self._commit_fenced(list(puts.values()), compares)
        revisions = {put.key: result.revision for put in puts.values()}
        if not result.committed:
            revisions = self._own_revisions(puts.values(), result.current)
        for job_id, put in puts.items():
            kept = self._kept[job_id]
            kept.revision, kept.payload = revisions[put.key], b""
            kept.keep(needed[job_id])
            await self._drop_leftover(job_id)

    # ------------------------------------------------------------ comparisons that failed

    def _own_revisions(self, puts: Iterable[Put], current: tuple[Entry, ...]) -> dict[str, int]:
        """Return the revisions if an earlier attempt of this write took effect, else raise."""
        there = {entry.key: entry for entry in current}
        for put in puts:
            entry = there.get(put.key)
            if entry is None or entry.value != put.value:
                raise Fenced(
                    f"record {put.key} was changed by a process that does not lead; this "
                    f"coordinator ends rather than overwrite it; see who else writes to this store"
                )
        return {put.key: there[put.key].mod_revision for put in puts}

    async def _commit_fenced(
        self, writes: Sequence[Write], compares: Sequence[Compare] = ()
    ) -> CommitResult:
        """Commit as the leader; only the caller's own comparisons can fail."""
        fence = self._leadership.fence()
        result = await self._store.commit([fence, *compares], writes)
        if not result.committed and not self._leadership.holds(fence, result.current):
            raise self._leadership.replaced(result.current)
        return result

    # ------------------------------------------------------------ pieces

    async def _split(self, job_id: JobId, data: bytes) -> bytes:
        """Write a large record as pieces; return the pointer to store in its place."""
        label = label_of(data)
        await self._write_pieces(job_id, label, data)
        return POINTER + label.encode()

    async def _write_payload(self, job_id: JobId, payload: bytes) -> None:
        """Make sure the pieces of a payload are stored before its job's first record."""
        kept = self._kept[job_id]
        if kept.payload != payload:
            # Pieces of another submission under this id that did not become a job.
            kept.keep(())
        # From here on `stage` does not write it any more.
        kept.payload = payload
        await self._write_pieces(job_id, ENTRY, payload)

    async def _write_pieces(self, job_id: JobId, label: str, data: bytes) -> None:
        kept = self._kept[job_id]
        if label in kept.labels:
            return
        puts = puts_of(self._folder(job_id, label), data)
        await self._expect(kept, label, puts)
        for put in puts:
            await self._commit_fenced([put])
        kept.has(label, puts)

    def _folder(self, job_id: JobId, label: str) -> str:
        return f"{self._pieces_prefix}{job_id}/{label}"

    async def _expect(self, kept: StoredJob, label: str, puts: Iterable[Put]) -> None:
        """Remember which keys will exist, and remove others of this label."""
        keys = tuple(put.key for put in puts)
        extra = tuple(key for key in kept.leftover.get(label, ()) if key not in keys)
        kept.leftover[label] = keys + extra
        if extra:
            await self._delete(extra)

    async def _drop_leftover(self, job_id: JobId) -> None:
        """Remove pieces of earlier records; a failed removal is retried at the next write.

        Their labels are no longer in use before that: a lost reply leaves the outcome unknown.
        """
        kept = self._kept[job_id]
        for label in tuple(kept.leftover):
            try:
                await self._delete(kept.leftover[label])
            except (StoreUnavailable, NotAuthorized) as error:
                log.warning("pieces_left job=%s error=%r", job_id, str(error))
                return
            del kept.leftover[label]

    async def _delete(self, keys: Iterable[str]) -> None:
        deletes: list[Write] = [Delete(key) for key in keys]
        for start in range(0, len(deletes), DELETES_MAX):
            await self._commit_fenced(deletes[start : start + DELETES_MAX])

    def _take_pieces(self, entries: Iterable[Entry]) -> dict[tuple[JobId, str], list[Entry]]:
        """Group pieces by job and label, and remember their keys."""
        grouped: dict[tuple[JobId, str], list[Entry]] = {}
        for entry in entries:
            parts = entry.key.removeprefix(self._pieces_prefix).split("/")
            if len(parts) != 3:
                raise CorruptRecord(f"key {entry.key} is no piece of a record; remove it")
            grouped.setdefault((JobId(parts[0]), parts[1]), []).append(entry)
        for (job_id, label), pieces in grouped.items():
            kept = self._kept.setdefault(job_id, StoredJob())
            kept.labels[label] = tuple(piece.key for piece in pieces)
        return grouped


async def read_records(store: Store, prefix: str) -> tuple[JobRecord, ...]:
    """Return all records by order of submission, without payloads; for standbys.

    A record that changes while it is read is read again.

    Raises:
        CorruptRecord: a record cannot be read; names the key.
    """
    jobs_prefix = f"{prefix}/jobs/"
    records = []
    for entry in (await store.read(jobs_prefix)).entries:
        job_id, data = entry.key.removeprefix(jobs_prefix), entry.value
        for _ in range(POINTER_TRIES):
            label = pointed(data)
            if not label:
                break
            pieces = (await store.read(f"{prefix}/pieces/{job_id}/{label}/")).entries
            if pieces:
                data = join(entry.key, label, pieces)
                break
            # The leader has written a newer record meanwhile, and removed this one's pieces.
            now = (await store.read(entry.key)).entries
            data = next((e.value for e in now if e.key == entry.key), b"")
        if data:
            records.append(decode_record(data, key=entry.key))
    return tuple(sorted(records, key=lambda record: record.sequence))


async def read_nodes(store: Store, prefix: str) -> NodesRecord:
    """Return the nodes record; for standbys.

    Raises:
        CorruptRecord: it cannot be read; names the key.
    """
    entry = await _read_nodes(store, f"{prefix}/nodes")
    return decode_nodes(entry.value, key=entry.key) if entry is not None else NodesRecord()


async def _read_nodes(store: Store, key: str) -> Entry | None:
    return next((e for e in (await store.read(key)).entries if e.key == key), None)


def _needed(record: JobRecord, value: bytes) -> tuple[str, ...]:
    """Return the labels of the pieces that a record needs; an ended job needs no payload."""
    label = pointed(value)
    return (label,) if record.phase in ENDED else (ENTRY, label)


def _with_payload(spec: JobSpec, payload: bytes) -> JobSpec:
    return replace(spec, entry=replace(spec.entry, payload=payload))
