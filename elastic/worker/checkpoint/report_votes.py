"""How the members of a group agree on one report: votes counted in the group's store.

Every member votes once per report. A vote is one round trip and never blocks, so a member
that has nothing to wait for continues at once. The last vote closes the report, and what it
counted is the same for all who read it. Members that have a checkpoint wait for the close; the
first of them by rank, the lead, then commits the checkpoint and sends the outcome.

Rule: whatever two members could see differently is decided by one of them and written down.
Votes travel through the store and not through a collective, because a member without a
checkpoint cannot know whether others have one; and the store needs no group of its own to be
formed, aborted and formed again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from elastic.errors import GroupError, check
from elastic.storage.marker import StoredFile

log = logging.getLogger(__name__)

COUNT_BITS = 15
WORLD_SIZE_MAX = (1 << COUNT_BITS) - 1
POLL_S_MIN = 0.0005
POLL_S_MAX = 0.01
WARN_INTERVAL_S = 30.0

POLL_INTERVAL_NS = 50_000_000
"""How often a member that waits in a report checks that its peers are still connected."""

Index = int | str
"""Which report: its number in this generation, or its place in the run."""


@dataclass(frozen=True)
class ReportVote:
    """What one member does at one report.

    Attributes:
        waits: it stays until the report is closed.
        requests: it knows that the group is to be left at a boundary.
        has_checkpoint: it has a part of a checkpoint, or failed to upload it.
    """

    waits: bool = False
    requests: bool = False
    has_checkpoint: bool = False


@dataclass(frozen=True)
class VoteCount:
    """How many members voted, and how."""

    votes: int = 0
    waiting: int = 0
    requesting: int = 0
    with_checkpoint: int = 0

    @classmethod
    def of(cls, number: int) -> VoteCount:
        """Read what the store counted: four counts in one integer, so that one add does."""
        counts = [(number >> (COUNT_BITS * place)) & WORLD_SIZE_MAX for place in range(4)]
        return cls(*counts)

    def number(self) -> int:
        counts = (self.votes, self.waiting, self.requesting, self.with_checkpoint)
        return sum(count << (COUNT_BITS * place) for place, count in enumerate(counts))

    def leaves(self) -> bool:
        """Return whether all leave here: one requests it, all wait, and a checkpoint is made."""
        return bool(self.requesting and self.with_checkpoint and self.waiting == self.votes)


@dataclass(frozen=True)
class ReportPart:
    """One member's share of a checkpoint.

    Attributes:
        name: of the checkpoint; the same from every member.
        files: also those that another member wrote, without their checksums.
        error: why this share could not be stored, "" if it was.
    """

    rank: int
    name: str
    files: tuple[StoredFile, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class ReportOutcome:
    """What became of a checkpoint.

    Attributes:
        path: of the committed checkpoint, "" if it could not be committed.
        error: why not; "" also if the coordinator has refused it, because the group is over.
        leaves: every member leaves the group here.
        is_pending: it counts once the coordinator, which is away, has recorded it.
    """

    path: str = ""
    error: str = ""
    leaves: bool = False
    is_pending: bool = False


KEYS = ("votes", "closed", "parts", "outcome", "ways")


class ReportVotes:
    """The votes of one group, seen by one of its members; used by one thread.

    Methods that touch the store raise torch's DistError when the store is gone, which is when
    its leader is.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        world_size: int,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Begin before the first report, with a store of this group alone.

        `watch` is called now and then while we wait; it raises GroupError to end the wait.
        """
        check(
            0 <= rank < world_size <= WORLD_SIZE_MAX,
            f"rank {rank} of {world_size}: expected at most {WORLD_SIZE_MAX} members",
        )
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._watch = watch
        self._voters = world_size

    def open_again(self) -> ReportVotes:
        """Return the same votes over another connection to the store, for another thread.

        Called by the thread of this one, so that it connects while the group is formed.
        """
        store: Store = self._store.clone()  # type: ignore[attr-defined]
        return ReportVotes(store, self._rank, world_size=self._world_size, watch=self._watch)

    def claim(self, index: Index, relative: str) -> bool:
        """Return whether this member is the one that writes a file which others may have too."""
        mine = str(self._rank)
        held = self._store.compare_set(_key(index, f"claim/{relative}"), "", mine)
        return bytes(held).decode() == mine

    def add_part(self, index: Index, part: ReportPart) -> None:
        """Send the others what we stored; comes before our vote."""
        line = json.dumps([part.rank, part.name, part.files, part.error])
        self._store.append(_key(index, "parts"), line + "\n")  # type: ignore[attr-defined]

    def report_way(self, index: Index, way: str) -> None:
        """Announce to the others that our part comes later, and how; comes before our vote."""
        self._store.append(_key(index, "ways"), way + "\n")  # type: ignore[attr-defined]

    def ways(self, index: Index) -> tuple[str, ...]:
        """Return how members with later parts upload them; complete once the report is closed."""
        key = _key(index, "ways")
        if not self._store.check([key]):
            return ()
        return tuple(sorted(bytes(self._store.get(key)).decode().splitlines()))

    def watch_also(self, watch: Callable[[], None]) -> None:
        """Call this as well, now and then, while we wait."""
        before = self._watch

        def both() -> None:
            watch()
            if before is not None:
                before()

        self._watch = both

    def parts(self, index: Index) -> tuple[ReportPart, ...]:
        """Return all parts by rank; complete once the report is closed.

        GroupError if no member wrote them.
        """
        text = bytes(self._store.get(_key(index, "parts"))).decode(errors="replace")
        try:
            parts = sorted(map(_part, text.splitlines()), key=lambda part: part.rank)
        except (ValueError, TypeError, RecursionError) as error:
            raise GroupError(f"report {index}: its parts cannot be read ({error})") from error
        ranks = [part.rank for part in parts]
        if not set(ranks) <= set(range(self._world_size)) or len(set(ranks)) < len(ranks):
            raise GroupError(
                f"report {index}: parts of ranks {ranks[:20]}, expected each once, of "
                f"{self._world_size} members"
            )
        return tuple(parts)

    def vote(self, index: Index, vote: ReportVote, *, voters: int | None = None) -> None:
        """Vote on a report; every member does so once for 0, 1, 2 and so on, or by name.

        `voters` is how many will, if not all.
        """
        self._voters = voters or self._world_size
        if self._world_size > 1:
            self._store.set(_by(self._rank), str(index))  # Sent, and no answer awaited.
        mine = VoteCount(1, int(vote.waits), int(vote.requests), int(vote.has_checkpoint))
        self._count(index, mine.number(), self._voters)

    def _count(self, index: Index, number: int, voters: int) -> VoteCount:
        count = VoteCount.of(self._store.add(_key(index, "votes"), number))
        is_vote = number & WORLD_SIZE_MAX  # Not the withdrawal of a promise to wait.
        if is_vote and count.votes == voters:
            if isinstance(index, str) and not count.waiting:
                self._store.delete_key(_key(index, "votes"))  # Never read again.
                return count
            self._store.set(_key(index, "closed"), str(count.number()))
            if isinstance(index, int) and index > 0:
                # All are here, so the previous report is never read again.
                for what in KEYS:
                    self._store.delete_key(_key(index - 1, what))
        return count

    def forget(self, index: Index, waiting: int) -> None:
        """Have nothing more to read of a closed report; the last of those who waited takes it out.

        Those with a number are taken out with the next one.
        """
        if isinstance(index, str) and self._store.add(_key(index, "readers"), 1) == waiting:
            for what in (*KEYS, "readers"):
                self._store.delete_key(_key(index, what))

    def wait_closed(self, index: Index, *, patience_s: float | None = None) -> VoteCount:
        """Wait until everyone has voted on `index`.

        Args:
            index: a report that we voted on with `waits`.
            patience_s: withdraw the promise to wait after so long, unless it is too late for
                that; None: wait for as long as it takes.

        Returns:
            The same count for everyone who waits; if we withdrew, one without votes.
        """
        closed = self._await(index, "closed", patience_s)
        if closed is None:
            so_far = self._count(index, -VoteCount(waiting=1).number(), self._world_size)
            if so_far.votes < self._world_size:
                return VoteCount()
            closed = self._await(index, "closed", None)
        return VoteCount.of(int(closed or b"0"))

    def report_outcome(
        self, index: Index, outcome: ReportOutcome, claimed: tuple[str, ...]
    ) -> None:
        """Let the others continue; only the lead does this, once."""
        text = json.dumps([outcome.path, outcome.error, outcome.leaves, outcome.is_pending])
        self._store.set(_key(index, "outcome"), text)
        for relative in claimed:
            self._store.delete_key(_key(index, f"claim/{relative}"))

    def wait_outcome(self, index: Index) -> ReportOutcome:
        text = self._await(index, "outcome", None)
        try:
            path, why, leaves, pends = json.loads(text or b'["", "", false, false]')
        except (ValueError, TypeError) as error:
            raise GroupError(f"report {index}: its outcome cannot be read ({error})") from error
        return ReportOutcome(str(path), str(why), bool(leaves), bool(pends))

    def _await(self, index: Index, what: str, patience_s: float | None) -> bytes | None:
        """Poll for a key until it exists; None if the timeout ends first.

        Looking again and again, instead of one blocking `wait`, keeps this thread in Python,
        where `GroupChanged` can reach it.
        """
        key = _key(index, what)
        began = time.monotonic()
        warn_after_s = WARN_INTERVAL_S
        pause_s = POLL_S_MIN
        while not self._store.check([key]):
            waited_s = time.monotonic() - began
            if patience_s is not None and waited_s >= patience_s:
                return None
            try:
                if self._watch is not None:
                    self._watch()
            except GroupError:
                # Members that have read the outcome may have left by it, and hung up.
                if self._store.check([key]):
                    break
                raise
            if waited_s > warn_after_s:
                warn_after_s += WARN_INTERVAL_S
                self._warn(index, what, waited_s)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, POLL_S_MAX)
        return bytes(self._store.get(key))

    def _warn(self, index: Index, what: str, waited_s: float) -> None:
        votes = VoteCount.of(self._store.add(_key(index, "votes"), 0)).votes
        absent = self._absent(index)
        missing = f"rank {', '.join(map(str, absent))} has not; " if absent else ""
        log.warning(
            "report_waits index=%s for=%s seconds=%.0f: %d of %d ranks have made report %s; %s"
            "every rank must call train.report equally often, with or without a checkpoint",
            index, what, waited_s, votes, self._voters, index, missing,
        )  # fmt: skip

    def _absent(self, index: Index) -> list[int]:
        """Return the ranks that have not voted on a report, [] if not all are to."""
        if self._voters < self._world_size:
            return []
        absent = []
        for rank in range(self._world_size):
            key = _by(rank)
            last = bytes(self._store.get(key)).decode() if self._store.check([key]) else ""
            is_behind = last != str(index)
            if isinstance(index, int):
                is_behind = not last or int(last.partition("-")[0]) < index
            if is_behind:
                absent.append(rank)
        return absent


def peers_watch(hung_up: Callable[[], bool]) -> Callable[[], None]:
    """Return what a member that waits in a report calls now and then."""
    check_at_ns = 0

    def check_hangup() -> None:
        nonlocal check_at_ns
        now_ns = time.monotonic_ns()
        if now_ns >= check_at_ns:
            check_at_ns = now_ns + POLL_INTERVAL_NS
            if hung_up():
                raise GroupError("a member left the group while others wait in train.report")

    return check_hangup


def _part(line: str) -> ReportPart:
    """Read a member's share; ValueError or TypeError if it is none."""
    rank, name, files, error = json.loads(line)
    if type(rank) is not int or not isinstance(name, str) or not isinstance(error, str):
        raise ValueError(f"a part of {line[:100]!r}")
    return ReportPart(rank, name, tuple(StoredFile(*file) for file in files), error)


def _by(rank: int) -> str:
    """Return the key of the newest report that a rank has voted on."""
    return f"report/by/{rank}"


def _key(index: Index, what: str) -> str:
    return f"report/{index}/{what}"
