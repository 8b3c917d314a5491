"""The state of the run, as this member has it.

A snapshot and a checkpoint hold it, a member that lacks it is sent it, and a call of the train
function leaves it to the next one.

Rule: while it is of no step, `is_held` is False.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

from elastic.core.facts import NO_GENERATION, Generation
from elastic.core.policy.cursor import NO_STEP, Cursor
from elastic.core.policy.recovery import PassPosition, RunPosition, SavedPosition
from elastic.core.policy.streams import Data
from elastic.errors import InvariantViolation, UsageError
from elastic.worker.data.stream_book import StreamBook
from elastic.worker.data.streams import MicroBatches
from elastic.worker.engine.logbook import Logbook
from elastic.worker.engine.recovery_modes import ResumeState
from elastic.worker.state.train_state import State, TrainState


class RunState:
    """What this member has of the run.

    Attributes:
        cursor: the next step to be committed.
        begun: the last epoch whose code before the pass has run, -1 if none.
        begun_step: the last whole step whose code before its micro-batches has run.
        streams: what is known of a dataset that is read as streams.
        loader: that was read last, None before the first pass.
        is_held: we have begun the run, received its state, or loaded it. What an error leaves of a
            step that is applied, or of a state that is put, is not the run's.
        agreed_in: the newest group that has met; its members had this state.
        committed_in: the group in which its newest step was committed, 0 for none.
    """

    def __init__(self, objects: TrainState, streams: StreamBook) -> None:
        self.objects = objects
        self.streams = streams
        self.cursor = Cursor()
        self.steps = 0
        self.begun = -1
        self.begun_step = NO_STEP
        self.logbook = Logbook()
        self.loader: MicroBatches | None = None
        self.is_held = False
        self.agreed_in = self.committed_in = NO_GENERATION
        # How the data was cut where this state comes from; empty once a loader was read.
        self._known_cut: dict[str, Any] = {}

    @property
    def data(self) -> Data | None:
        """Return how the data is cut, None while no loader was read."""
        return self.loader.plan if self.loader is not None else None

    @property
    def cut(self) -> dict[str, Any]:
        """Return how the data is cut, or was where this state comes from; empty if unknown."""
        return _plain(self.data) if self.data is not None else dict(self._known_cut)

    def the_loader(self) -> MicroBatches:
        if self.loader is None:
            raise InvariantViolation("no loader is read")
        return self.loader

    def position(self, in_pass: PassPosition, saved: SavedPosition, held: int) -> RunPosition:
        """Return what the others are to know of us when a group meets.

        `saved` is the newest state that we know in storage, or on a node without members; `held`
        the steps of the newest snapshot in our node's memory, -1 for none.
        """
        return RunPosition(
            has_state=self.is_held,
            cursor=self.cursor,
            epoch_steps=(self.loader or self.streams).steps_of(self.cursor.epoch),
            in_pass=in_pass,
            generation=self.agreed_in,
            committed=self.steps,
            saved=saved,
            held=held,
            committed_in=self.committed_in,
        )

    def read(self, loader: MicroBatches) -> None:
        """A pass over this loader begins; UsageError if it is cut unlike the epoch so far."""
        known, mine = self._known_cut, _plain(loader.plan)
        wrong = [name for name, value in known.items() if mine.get(name) != value]
        if self.cursor.step and wrong:
            was, now = (
                ", ".join(f"{n}={known[n]}" for n in wrong),
                ", ".join(f"{n}={mine.get(n)}" for n in wrong),
            )
            raise UsageError(
                f"this run stands at step {self.cursor.step} of epoch {self.cursor.epoch}, with "
                f"{was}; the loader has {now}: continue with the same data, batch_size, seed, "
                f"sampler (let train.register know one that changes) and "
                f"prepare_data_loader(global_batch_size=...), or begin a new run"
            )
        self.loader, self._known_cut = loader, {}

    def count_step(self, generation: Generation = NO_GENERATION) -> None:
        """A step was committed in this group."""
        self.cursor = Cursor(self.cursor.epoch, self.cursor.step + 1)
        self.steps += 1
        self.committed_in = generation

    # ------------------------------------------------------------------- as a whole

    def take(self, saved: Sequence[int]) -> State:
        """Return the state; its tensors are the live ones.

        `saved` is the `SnapshotId` of the newest snapshot.
        """
        return state_of(self, self.objects.take(), saved)

    def put(self, state: State) -> None:
        """Make this our state; UsageError if it is of others: only `is_held` is changed then."""
        self.is_held = False
        self.objects.put(state["objects"])
        self.logbook.load_state(state["logged"])
        self.streams.receive([state["streams"]])
        self.steps = state["steps"]
        self.begun = state["begun"]
        self.begun_step = Cursor(*state["begun_step"])
        self.committed_in = state["committed_in"]
        self._known_cut = state["data"]
        self.cursor = Cursor(*state["cursor"])
        self.is_held = True

    def go_on(self, left: ResumeState) -> None:
        """Continue from where an earlier call of the train function stood."""
        self.objects.put(left.state)
        self.cursor, self.logbook = left.cursor, left.logbook
        self.steps, self.begun = left.steps, left.begun
        self.begun_step = left.begun_step
        self._known_cut = left.cut
        self.is_held, self.agreed_in = True, left.agreed_in
        self.committed_in = left.committed_in


def state_of(run: RunState | ResumeState, objects: State, saved: Sequence[int]) -> State:
    """Return the state of a run, or of what a call of the train function has left of it.

    `objects` are its objects', `saved` as in `RunState.take`.
    """
    return {
        "objects": objects,
        "cursor": [run.cursor.epoch, run.cursor.step],
        "logged": run.logbook.state(),
        "streams": run.streams.sent(run.cursor, all_of_it=True),
        "steps": run.steps,
        "begun": run.begun,
        "begun_step": [run.begun_step.epoch, run.begun_step.step],
        "committed_in": run.committed_in,
        "saved": list(saved),
        "data": run.cut,
    }


def _plain(data: Data) -> dict[str, Any]:
    fields = asdict(data)
    return {name: v.value if isinstance(v, Enum) else v for name, v in fields.items()}
