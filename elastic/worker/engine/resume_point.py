"""The state from which the train function continues if it is left now and called again.

The next call runs code again that this one had begun, so it continues from the state before that
code:

    left before the commit of a step    The state at hand.
    behind the commit, in the same      A copy from before the commit. It is taken if the loop calls
    iteration                           collectives of its own there, and only of a small state:
                                        training must not wait for it, nor run out of memory.
    between passes, behind the loop     A copy of all but the weights, if these are unchanged since:
                                        averages, for example, may stand in for them.
    none of these copies is there       Another member's state, or what was saved last.

Behind the commit the script's own code runs: its scheduler may have stepped, its average not, which
cannot be seen. Orders to leave wait until that code is over. An error of a collective that it calls
there cannot wait, and neither can a script that goes on after such an error: what it made of the
state since counts no more.

Rule: a state is whole while no code of the user's for its last step, or its last pass, is running.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from elastic.worker.base.interrupt import GroupChanged
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.divergence import Divergence, Prints
from elastic.worker.engine.recovery_modes import GroupProvider, ResumeState
from elastic.worker.group.accelerators import record, wait_done
from elastic.worker.group.c10d import all_by_gloo, issued
from elastic.worker.state.train_state import State, TrainState

log = logging.getLogger(__name__)

COPIED_WEIGHTS_BYTES_MAX = 4 << 20
"""A state with more weights is not copied in each step."""


class ResumePoint:
    """Whether the state at hand is whole; if not, a copy of the last one that was.

    Attributes:
        is_whole: it is; what is kept does not count then.
        given: what an earlier call of the train function has reached in this process, None once
            the loop continues from it.
        calls_late: the loop calls collectives of its own after its optimizers have stepped.
    """

    def __init__(self, state: TrainState, watch: Divergence, given: ResumeState | None) -> None:
        """Begin whole.

        Args:
            state: the prepared and registered objects.
            watch: knows the checksums of their weights.
            given: what an earlier call of the train function has reached, None if nothing.
        """
        self.is_whole = True
        self.given = given
        self.calls_late = given is not None and given.calls_late
        self._state, self._watch = state, watch
        self._kept: ResumeState | None = None
        # Checksums of weights that are not part of the copy, None if they are.
        self._weights: Prints | None = None
        # Collectives begun before the user's code, and whether that follows a commit, no pass.
        self._begun: tuple[int, ...] = ()
        self._follows_commit = False

    @property
    def is_small(self) -> bool:
        """Return whether weights are copied, too."""
        return self._state.weights_bytes() <= COPIED_WEIGHTS_BYTES_MAX

    def keep(
        self,
        resume_from: Callable[[State], ResumeState],
        without_gradients: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Keep a copy of the state as it is now, without its weights if those are large.

        Args:
            resume_from: returns how a call continues from a copy.
            without_gradients: a context in which buffers are those of the last commit.
        """
        self._kept = self._weights = None
        weights = self.is_small and not self._state.is_sharded
        try:
            with without_gradients():
                kept = resume_from(self._state.copied(weights=weights))
            self._weights = None if weights else self._watch.weights()
            self._kept = kept
        except Exception as error:  # Of memory, or of what the user has registered.
            log.warning("state_not_kept reason=%r", str(error))

    def begin_code(self, *, follows_commit: bool) -> None:
        """Code of the user's runs from here on, after a commit or between passes."""
        self.is_whole = False
        self._begun, self._follows_commit = issued(), follows_commit

    def end_code(self, check: Callable[[], None]) -> None:
        """The user's code is through.

        Args:
            check: called if it has called collectives; raises if one of them has failed.
        """
        if not self.is_whole and issued() != self._begun:
            check()
            self._note_late()
        self.is_whole = True
        self._kept = self._weights = None

    @property
    def has_copy(self) -> bool:
        """Return whether a state was kept, with its weights or without."""
        return self._kept is not None

    def copy(self) -> ResumeState | None:
        """Return the kept state; None if weights that are not part of it have changed since."""
        if self._weights is None:
            return self._kept
        try:
            return self._kept if self._weights == self._watch.weights() else None
        except Exception as error:  # The script has moved them, say to "meta".
            log.warning("weights_unreadable reason=%r", str(error))
            return None

    def _note_late(self) -> None:
        if not self._follows_commit or self.calls_late:
            return
        self.calls_late = True
        if not self.is_small:
            log.info(
                "collectives follow optimizer.step(): if a worker is lost in one of them, training "
                "continues from the newest snapshot; call them before the step, or use train.log"
            )


def check_collectives(
    groups: GroupProvider, context: WorkerContext, devices: Iterable[torch.device]
) -> None:
    """Wait until devices have run the script's collectives, which may have failed.

    Raises:
        GroupChanged: they may, and nothing is to continue from this state.
    """

    def check() -> None:
        if groups.has_failed(context.generation):
            raise GroupChanged("the group broke in code of the script's", context.generation)

    if not all_by_gloo():  # NCCL's calls return before, and aborts end them without an error.
        with context.activity.waiting():
            wait_done(record(dict.fromkeys(devices)), check)
    check()
