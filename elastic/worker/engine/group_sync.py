"""What the members of a new group exchange before they train: identity, position, needs.

Rule: all members receive the same table and compute the same decision from it. If some cannot train
together, all raise the same error, and none waits for one that has given up.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastic.core.policy.cursor import Cursor, derive
from elastic.core.policy.recovery import (
    CodePlace,
    PassPosition,
    RunPosition,
    SavedPosition,
    is_outdated,
    next_code_places,
    plan_transfers,
)
from elastic.core.policy.streams import Data, StreamPlan
from elastic.errors import UsageError
from elastic.worker.base.spans import span
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.engine.logbook import Logbook
from elastic.worker.group.c10d import default_store
from elastic.worker.group.member_links import MemberEntry, join_links, open_links
from elastic.worker.group.peer_sockets import PeerAddress
from elastic.worker.reduce.reducer import OptimizerUnit
from elastic.worker.reduce.step_metadata import send_metadata
from elastic.worker.state.transfer import transfer


@dataclass(frozen=True)
class SyncResult:
    """What came of a meeting.

    Attributes:
        state: what we received, None if we needed nothing.
        cursors: where each member stands now, by rank.
        code_places: where each member will run code of its own again, by rank.
        num_bytes: of state that we sent or received.
        nobody_has_state: no member has the state of the run, and nothing was sent.
        is_outdated: what was saved is newer than theirs, and nothing was sent.
        shared: what each member knows of streams of data, as `StreamBook.sent` has it; empty if
            no member knows anything.
        memories: which memory of its node each member has for snapshots, by rank; 0 for none.
    """

    state: Any
    cursors: tuple[Cursor, ...]
    code_places: tuple[CodePlace, ...]
    num_bytes: int
    nobody_has_state: bool = False
    is_outdated: bool = False
    shared: tuple[bytes, ...] = ()
    memories: tuple[int, ...] = ()


def synchronize(
    group: Any,
    position: RunPosition,
    units: Sequence[OptimizerUnit],
    data: Data | None,
    take: Callable[[], Any],
    reach: PeerAddress,
    *,
    begins: bool = True,
    shared: bytes = b"",
    memory: int = 0,
) -> SyncResult:
    """Find out who is how far, connect directly, and send state to those who need it.

    Args:
        group: the process group that stands.
        position: how far we are.
        units: the parameters that we have prepared.
        data: how our data is cut, None if we do not know it yet.
        take: returns our state, called only if it is sent.
        reach: how the others reach us.
        begins: nothing that was saved can be read, or it was. Where no member has the state of the
            run, rank 0's is that of its beginning.
        shared: what we know of streams of data.
        memory: which memory of its node we have for snapshots, 0 for none.

    Raises:
        RuntimeError: the group broke; nothing of ours has changed.
        UsageError: members cannot train together; all of them raise it.
    """
    threads = torch.get_num_threads()
    entry = open_links(group, reach).entry if group.size() > 1 else MemberEntry()
    prints = _model_print(units), _data_print(data)
    mine = MemberInfo(position, *prints, threads, entry, len(shared), memory)
    members = report_all(group, mine)
    check_alike(members)
    if group.size() > 1:
        join_links(group, [one.entry for one in members])
    positions = [one.position for one in members]
    memories = tuple(one.memory for one in members)
    nobody = not any(one.has_state for one in positions)
    if not begins and (nobody or is_outdated(positions)):
        return SyncResult(
            None, (), (), 0, nobody_has_state=nobody, is_outdated=not nobody, memories=memories
        )
    plan = plan_transfers(positions).value
    with span("transfer"):
        state, num_bytes = transfer(group, plan, take)
    sender = plan.sender_to(group.rank())
    if sender is not None and members[sender].threads != threads:
        torch.set_num_threads(members[sender].threads)
    parts = _share_all(group, shared, [one.num_shared for one in members])
    code_places = next_code_places(positions, plan)
    return SyncResult(state, plan.cursors, code_places, num_bytes, shared=parts, memories=memories)


def share_book(group: Any, book: StreamBook, cursor: Cursor) -> bool:
    """Let every member know where every stream can be continued; returns True.

    So that, when one of them dies, the next reader of its streams need not count from their first
    sample.

    Raises:
        RuntimeError: the group broke.
    """
    if group.size() > 1:
        mine = book.sent(cursor)
        sizes = [int(row[0]) for row in send_metadata(group, [float(len(mine))])]
        book.receive(_share_all(group, mine, sizes))
    return True


def share_bytes(group: Any, mine: bytes) -> tuple[bytes, ...]:
    """Exchange bytes of any length but 0; returns everyone's, by rank.

    Raises:
        RuntimeError: the group broke.
    """
    if group.size() == 1:
        return (mine,)
    sizes = [int(row[0]) for row in send_metadata(group, [float(len(mine))])]
    return _share_all(group, mine, sizes)


def _share_all(group: Any, mine: bytes, sizes: Sequence[int]) -> tuple[bytes, ...]:
    """Exchange bytes of any length; nothing is sent if none has any.

    Returns:
        Everyone's, by rank; empty if none has any.

    Raises:
        RuntimeError: the group broke.
    """
    longest = max(sizes)
    if not longest or group.size() == 1:
        return ()
    sent = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, sent, group=group)
    return tuple(part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True))


def share_latest(group: Any, cursors: Sequence[Cursor], logbook: Logbook) -> None:
    """Send an epoch's last values to those who have not passed its gate, as others have.

    Raises:
        RuntimeError: the group broke.
    """
    furthest = max(cursors)
    if min(cursors) < furthest:
        rows = send_metadata(group, logbook.latest_row())
        if cursors[group.rank()] < furthest:
            logbook.take_latest(rows[cursors.index(furthest)])


BEGUN, INSIDE = "begun", "inside"


def note_loop_begun(*, is_inside: bool) -> None:
    """Let the members of a new group know that we do not come from the script's beginning.

    Args:
        is_inside: we are in a pass, and no more at the head of its epoch.

    Raises:
        RuntimeError: the group broke.
    """
    if (store := _store()) is not None:
        for key in (BEGUN, INSIDE) if is_inside else (BEGUN,):
            store.set(key, b"1")


def others_have_begun(*, is_inside: bool) -> bool:
    """Return whether any member has noted that; known soon after the group stands.

    Args:
        is_inside: it is in a pass; if not, it has begun the loop.
    """
    store = _store()
    return store is not None and bool(store.check([INSIDE if is_inside else BEGUN]))


def _store() -> Any:
    store = default_store()
    return None if store is None else dist.PrefixStore("loop", store)


@dataclass(frozen=True)
class MemberInfo:
    """What a member reports of itself when a group meets.

    Attributes:
        model: fingerprint of what it prepared, 0 <= it < 2**63.
        data: fingerprint of its data and batch, 0 if it does not know them yet.
        threads: CPU threads of one operation; their number can change the last bit of a sum.
        num_shared: bytes of what it knows of streams of data.
        memory: which memory of its node it has for snapshots, 0 for none.
    """

    position: RunPosition
    model: int
    data: int
    threads: int
    entry: MemberEntry
    num_shared: int = 0
    memory: int = 0


def report_all(group: Any, mine: MemberInfo) -> list[MemberInfo]:
    """Exchange what everyone reports of itself; returns it by rank.

    Raises:
        RuntimeError: the group broke.
    """
    if group.size() == 1:
        return [mine]
    position = mine.position
    row = torch.tensor(
        [
            int(position.has_state), position.cursor.epoch, position.cursor.step,
            position.epoch_steps, int(position.in_pass), position.generation,
            position.committed, *position.saved,
            position.held, mine.model, mine.data, mine.threads, mine.num_shared, mine.memory,
            *mine.entry.numbers(),
        ],
        dtype=torch.int64,
    )  # fmt: skip
    rows = [torch.empty_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    members = []
    for one in rows:
        has_state, epoch, step, epoch_steps, in_pass, generation, committed, *others = one.tolist()
        taken_in, saved, held, model, data, threads, num_shared, memory, *entry = others
        position = RunPosition(
            has_state=bool(has_state),
            cursor=Cursor(epoch, step),
            epoch_steps=epoch_steps,
            in_pass=PassPosition(in_pass),
            generation=generation,
            committed=committed,
            saved=SavedPosition(taken_in, saved),
            held=held,
        )
        members.append(
            MemberInfo(position, model, data, threads, MemberEntry.of(entry), num_shared, memory)
        )
    return members


def _model_print(units: Sequence[OptimizerUnit]) -> int:
    """Return a number that is equal where the same parameters were prepared."""
    parts = []
    for unit in units:
        for name, parameter in unit.parameters:
            parts += [zlib.crc32(name.encode()), *parameter.shape, *parameter.stride()]
    return derive(len(parts), *parts)


def _data_print(data: Data | None) -> int:
    """Return a number that is equal where the same data is cut in the same way; 0 for unknown."""
    if data is None:
        return 0
    if isinstance(data, StreamPlan):
        return data.fingerprint
    flags = int(data.shuffle) + 2 * int(data.drop_last)
    sizes = (data.num_samples, data.micro_batch_size, data.num_micro_batches)
    return derive(data.seed, *sizes, flags) | 1


def check_alike(members: Sequence[MemberInfo]) -> None:
    """Refuse members that cannot train together.

    Raises:
        UsageError: they have prepared different parameters or data.
    """
    for rank, one in enumerate(members):
        if one.model != members[0].model:
            raise UsageError(
                f"rank {rank} has prepared other parameters than rank 0 (their names, shapes "
                f"or strides differ): every worker must build the same model from the same config"
            )
    # Epochs may have loaders of their own, and a member may be in the next epoch already.
    by_epoch: dict[int, dict[int, int]] = {}
    for rank, one in enumerate(members):
        if one.data:
            by_epoch.setdefault(one.position.cursor.epoch, {})[one.data] = rank
    known = max(by_epoch.values(), key=len, default={})
    if len(known) > 1:
        raise UsageError(
            f"ranks {', '.join(map(str, sorted(known.values())))} have data sets of different "
            f"length, or other batch sizes, seeds or shuffling: every worker must prepare the same "
            f"loader from the same data"
        )
