"""Telemetry of training: a worker's time by category, its newest steps, its position in the run.

Rule: durations are nanoseconds on the clock of the machine that measured them, and are never
compared with times of another machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from elastic.core.config import NS_PER_S


@dataclass(frozen=True)
class Goodput:
    """The time of workers by category: each nanosecond of each worker is in exactly one field.

    Attributes:
        productive_ns: computed and exchanged for steps that were committed and kept.
        data_wait_ns: waited for the loader.
        straggler_wait_ns: waited in an exchange for the slowest rank.
        redone_ns: computed what had to be computed again: micro-batches of a step that broke, steps
            after the checkpoint that a run went back to, and unreported work of a lost worker.
        reform_ns: left a group, formed the next one, exchanged positions.
        start_ns: started: process, imports, model, until it trained for the first time.
        restore_ns: read a checkpoint, or received state from a peer.
        checkpoint_stall_ns: the loop was blocked by a checkpoint.
        eval_ns: read a prepared loader to evaluate.
        user_ns: ran code of the user's outside of steps, such as between epochs.
        drain_ns: had nothing more to do: its node drains, its job ends, others still finish.
        below_min_ns: was ready, and waited because too few workers were.
    """

    productive_ns: int = 0
    data_wait_ns: int = 0
    straggler_wait_ns: int = 0
    redone_ns: int = 0
    reform_ns: int = 0
    start_ns: int = 0
    restore_ns: int = 0
    checkpoint_stall_ns: int = 0
    eval_ns: int = 0
    user_ns: int = 0
    drain_ns: int = 0
    below_min_ns: int = 0

    @property
    def allocated_ns(self) -> int:
        """Return the sum of all: how long workers were held."""
        return sum(self.times())

    @property
    def ratio(self) -> float:
        """Return the productive share of it, 0 to 1; 0 before any report."""
        return self.productive_ns / self.allocated_ns if self.allocated_ns else 0.0

    def times(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in FIELDS)

    def seconds(self) -> dict[str, float]:
        """Return the times in seconds by category, such as {"productive": 12.5}."""
        return {name.removesuffix("_ns"): getattr(self, name) / NS_PER_S for name in FIELDS}

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs: the ratio, the allocated time, and the seconds by category."""
        seconds = {name: round(value, 6) for name, value in self.seconds().items()}
        allocated_s = round(self.allocated_ns / NS_PER_S, 6)
        return {"ratio": round(self.ratio, 6), "allocated_s": allocated_s, "seconds": seconds}


UNSAVED_CHARS_MAX = 1000
"""Of an error of storage: some hold a whole answer of a server."""

FIELDS = tuple(field.name for field in fields(Goodput))
CATEGORIES = tuple(name.removesuffix("_ns") for name in FIELDS)
(
    PRODUCTIVE, DATA_WAIT, STRAGGLER_WAIT, REDONE, REFORM, START,
    RESTORE, CHECKPOINT_STALL, EVAL, USER, DRAIN, BELOW_MIN,
) = range(len(FIELDS))  # fmt: skip
"""Places of the categories in `Goodput.times()`."""


@dataclass(frozen=True)
class Telemetry:
    """The newest steps of one worker, about a second of them, and its position in the run.

    Counted by each rank, in `worker.base.timing.Timing`, when a step is committed: `samples` are
    those of all ranks, so that the number is the same on each, and not to be added up.

    Sent by each rank to its agent after its group's first step, then at most once a second; on to
    the coordinator at once, but of ranks other than 0 in a group of 200 or more only every 6 to
    30 s (`policy.pacing.telemetry_every_ns`).

    Shown by `elastic status`: for a job that of the lowest rank that has sent any
    (`first_reported`), in `client.pace.pace_line`; for each worker its own, in `STEP_COLUMNS`. A
    rate is over `wall_ns`, about the last second, and no mean of the run.

    A new number is a field here, and one of the same name in the message `Telemetry` of
    `proto/elastic/v1/facts.proto` (then `make proto`; a release raises `core.messages.PROTOCOL`).
    Nothing on the way names the fields. It is counted in `Timing`'s `_Window`, as an attribute and
    in `telemetry()`, or given by `StepEngine._telemetry` if the loop knows it; and shown in
    `pace_line` for a job, in `STEP_COLUMNS` and `step_columns` for each worker, and for programs in
    `as_dict` below.

    Attributes:
        steps: committed in this window; the times below are sums over them.
        wall_ns: duration of the window.
        data_wait_ns: waited for the loader.
        compute_ns: forward, backward and user code within the steps. What is left of `wall_ns` went
            into something outside of steps, such as an evaluation or a checkpoint.
        exchange_ns: waited in exchanges, for slower ranks and for the network.
        straggler_wait_ns: the part of `exchange_ns` for slower ranks.
        commit_ns: changed the weights.
        bytes_sent: gradients that this rank sent to others.
        samples: of the whole group, in these steps.
        tokens: what `weigh` counted in these steps, of the whole group; 0 without it.
        straggler: rank that the others waited for longest, -1 if they did not wait.
        epoch, step: the next step to be committed; 0, 0 before the first or without a loop over
            `train.epochs()`.
        num_epochs: that the loop does, 0 if not known.
        num_steps: of this epoch, 0 if not known.
        logged: JSON object of the newest averages of `train.log`; of rank 0, "" of the others.
        unsaved: why storage has refused the rank's part of the group's newest automatic checkpoint,
            or, of rank 0, any of it; "" if it has not. At most `UNSAVED_CHARS_MAX`.
    """

    steps: int = 0
    wall_ns: int = 0
    data_wait_ns: int = 0
    compute_ns: int = 0
    exchange_ns: int = 0
    straggler_wait_ns: int = 0
    commit_ns: int = 0
    bytes_sent: int = 0
    samples: int = 0
    tokens: int = 0
    straggler: int = -1
    epoch: int = 0
    step: int = 0
    num_epochs: int = 0
    num_steps: int = 0
    logged: str = ""
    unsaved: str = ""

    @property
    def position(self) -> tuple[int, int]:
        """Return its position in the run; comparable."""
        return self.epoch, self.step

    def per_second(self, amount: int) -> float:
        """Return how much of something summed in this window that is in a second."""
        return amount * NS_PER_S / self.wall_ns if self.wall_ns else 0.0

    @property
    def step_s(self) -> float:
        """Return the mean time of a step in seconds, 0 without one."""
        return self.wall_ns / self.steps / NS_PER_S if self.steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs: rates per second, and the parts of the mean step in seconds."""
        steps = max(1, self.steps)
        parts = ("wall", "data_wait", "compute", "exchange", "straggler_wait", "commit")
        return {
            "epoch": self.epoch,
            "step": self.step,
            "num_epochs": self.num_epochs,
            "num_steps": self.num_steps,
            "steps_per_s": round(self.per_second(self.steps), 3),
            "samples_per_s": round(self.per_second(self.samples), 3),
            "tokens_per_s": round(self.per_second(self.tokens), 3),
            "bytes_per_s": round(self.per_second(self.bytes_sent), 3),
            "step_s": {
                part: round(getattr(self, f"{part}_ns") / steps / NS_PER_S, 6) for part in parts
            },
            "straggler": self.straggler if self.straggler >= 0 else None,
            "logged": json.loads(self.logged) if self.logged else {},
        }


NOTHING_REPORTED = Telemetry()


def first_reported(by_rank: Iterable[Telemetry]) -> Telemetry:
    """Return a job's telemetry: that of the first member that has reported any."""
    return next((one for one in by_rank if one != NOTHING_REPORTED), NOTHING_REPORTED)
