"""What is known of the streams of a run: where epochs end, and snapshots to continue from.

Rule: which samples are read does not depend on the snapshots. Positions follow from the cursor; a
snapshot only saves the next reader of a stream the samples before it. Where an epoch ends is a fact
about the data.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.streams import StreamPosition, nearest
from elastic.errors import UsageError
from elastic.worker.state.packing import pack, unpack

log = logging.getLogger(__name__)

KEPT = 3
"""Snapshots of one sequence that are kept: prefetched ones lie ahead of the committed step."""
SHARE_STEPS = 64
"""Steps after which members send each other their snapshots. Those of a dead one are no older."""


@dataclass(frozen=True)
class StreamSnapshot:
    """The state of a sequence of samples at the beginning of a step.

    Attributes:
        cut: fingerprint of how the data is cut.
        state: what the dataset's `state_dict` returned there.
        mark: checksum of the sample that comes next; 0 if it has none.
    """

    position: StreamPosition
    cut: int
    state: Any
    mark: int


class StreamBook:
    """The ends and snapshots that this process knows of.

    Attributes:
        has_states: the dataset has states, so that there is something to share.
    """

    def __init__(self) -> None:
        self.has_states = False
        self._own: set[int] = set()
        self._ends: dict[int, int] = {}
        self._snapshots: dict[tuple[int, int], list[StreamSnapshot]] = {}
        self._is_unsendable = False

    def steps_of(self, epoch: int) -> int:
        """Return the steps of an epoch, 0 while they are not known."""
        return self._ends.get(epoch, 0)

    def end(self, epoch: int, steps: int) -> None:
        self._ends = {e: s for e, s in self._ends.items() if e >= epoch - 1} | {epoch: steps}

    def is_due(self, cursor: Cursor, is_saved: bool = False) -> bool:
        """Return whether members share snapshots at this cursor; the same on all of them.

        Args:
            cursor: the next step.
            is_saved: a checkpoint is taken here, from which its readers continue.
        """
        return self.has_states and (is_saved or cursor.step % SHARE_STEPS == 0)

    def read(self, snapshots: Iterable[StreamSnapshot]) -> None:
        """Know what a reader of ours has taken; what others know is not ours to send."""
        for one in snapshots:
            self._own.add(one.position.sequence)
            self.add([one])

    def add(self, snapshots: Iterable[StreamSnapshot]) -> None:
        """Know these, too; those of earlier epochs are forgotten."""
        for one in snapshots:
            epoch, sequence = one.position.epoch, one.position.sequence
            known = self._snapshots.setdefault((epoch, sequence), [])
            if all(other.position != one.position for other in known):
                known.append(one)
                known.sort(key=lambda other: other.position.step)
                del known[:-KEPT]
            for key in [key for key in self._snapshots if key[0] < epoch]:
                del self._snapshots[key]

    def nearest(self, position: StreamPosition, cut: int) -> StreamSnapshot | None:
        """Return the snapshot to continue from, None to begin at the first sample."""
        known = self._snapshots.get((position.epoch, position.sequence), [])
        fits = [one for one in known if one.cut == cut]
        index = nearest([one.position for one in fits], position)
        return None if index is None else fits[index]

    # ------------------------------------------------------------------- as part of a state

    def take(self, cursor: Cursor) -> dict[str, Any]:
        """Return what helps to continue at a cursor: plain values, tensors and arrays."""
        ends = [[epoch, steps] for epoch, steps in self._ends.items() if epoch == cursor.epoch]
        found = []
        for (epoch, sequence), known in sorted(self._snapshots.items()):
            wanted = StreamPosition(cursor.epoch, cursor.step, sequence)
            index = nearest([one.position for one in known], wanted)
            if epoch == cursor.epoch and index is not None:
                one = known[index]
                where = [epoch, one.position.step, sequence]
                found.append({"at": where, "cut": one.cut, "state": one.state, "mark": one.mark})
        return {"ends": ends, "snapshots": found}

    def put(self, states: Mapping[str, Any]) -> None:
        """Merge what another one has taken; an empty mapping adds nothing."""
        for epoch, steps in states.get("ends", ()):
            self.end(int(epoch), int(steps))
        self.add(
            StreamSnapshot(
                StreamPosition(*map(int, one["at"])),
                int(one["cut"]),
                one["state"],
                int(one["mark"]),
            )
            for one in states.get("snapshots", ())
        )

    def sent(self, cursor: Cursor, *, all_of_it: bool = False) -> bytes:
        """Return what `take` returns as bytes, empty if there is nothing.

        `all_of_it` has also what others have read, and know themselves.
        """
        states = self.take(cursor)
        if not all_of_it:
            own = [one for one in states["snapshots"] if one["at"][2] in self._own]
            states["snapshots"] = own
        if not states["ends"] and not states["snapshots"]:
            return b""
        try:
            skeleton, tensors = pack(states)
        except UsageError as error:
            if not self._is_unsendable:
                log.warning(
                    "stream_states_kept: others count up to their streams instead: %s", error
                )
            self._is_unsendable = True
            skeleton, tensors = pack(states | {"snapshots": []})
        buffer = io.BytesIO()
        text = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)
        torch.save([text, *tensors], buffer)
        return buffer.getvalue()

    def receive(self, sent: Iterable[bytes]) -> None:
        for data in filter(None, sent):
            text, *tensors = torch.load(io.BytesIO(data), weights_only=True)
            skeleton = torch.load(io.BytesIO(text.numpy().tobytes()), weights_only=True)
            self.put(unpack(skeleton, tensors))
