"""The state from which the train function continues if it is left now and called again.

The next call runs code again that this one had begun, so it continues from the state before that
code:

    left before the commit of a step    The state at hand. Where a loop over whole steps calls
                                        collectives of its own before its optimizers step, a copy
                                        from before that code, of a small state.
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
from copy import deepcopy
from typing import Any

import torch

from elastic.core.facts import NO_GENERATION, Generation
from elastic.core.policy.program_points import ProgramPoint
from elastic.worker.base.interrupt import GroupChanged
from elastic.worker.engine.context import WorkerContext
from elastic.worker.engine.divergence import Divergence, Prints
from elastic.worker.engine.logbook import Logbook
from elastic.worker.engine.recovery_modes import GroupProvider, ResumeState
from elastic.worker.engine.run_state import RunState
from elastic.worker.engine.usage_errors import weights_changed
from elastic.worker.group.accelerators import record, wait_done
from elastic.worker.group.c10d import all_by_gloo, issued
from elastic.worker.state.train_state import State

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

    def __init__(self, run: RunState, divergence: Divergence, given: ResumeState | None) -> None:
        """Begin whole; `given` is what an earlier call of the train function has reached."""
        self.is_whole = True
        self.given = given
        self.calls_late = given is not None and given.calls_late
        self._run, self._divergence = run, divergence
        self._kept: ResumeState | None = None
        # Checksums of weights that are not part of the copy, None if they are.
        self._weights: Prints | None = None
        # Whether it calls any between the exchange of a whole step and its commit, None if unknown.
        self._calls_early: bool | None = None
        # Collectives begun before the user's code, and whether that follows a commit, no pass.
        self._begun: tuple[int, ...] = ()
        self._follows_commit = False

    @property
    def is_small(self) -> bool:
        """Return whether weights are copied, too."""
        return self._run.objects.weights_bytes() <= COPIED_WEIGHTS_BYTES_MAX

    # ------------------------------------------------------------------- around the user's code

    def keep(
        self,
        program_points: tuple[ProgramPoint, ...],
        without_gradients: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Keep a copy of the state as it is now, without its weights if those are large.

        Args:
            program_points: where each member of the group runs code of its own next, by rank.
            without_gradients: a context in which buffers are those of the last commit.
        """
        self._kept = self._weights = None
        objects = self._run.objects
        weights = self.is_small and not objects.is_sharded
        try:
            with without_gradients():
                state = objects.copied(weights=weights)
                logbook = deepcopy(self._run.logbook)
                logbook.forget_step()
                kept = self._resume_state(state, logbook, program_points)
            self._weights = None if weights else self._divergence.weights()
            self._kept = kept
        except Exception as error:  # Of memory, or of what the user has registered.
            log.warning("state_not_kept reason=%r", str(error))

    def begin_code(self, *, follows_commit: bool) -> None:
        """Code of the user's runs from here on, after a commit or between passes."""
        self.is_whole = False
        self._begun, self._follows_commit = issued(), follows_commit

    def end_code(
        self, groups: GroupProvider, context: WorkerContext, parameters: Iterable[torch.Tensor]
    ) -> None:
        """The user's code is through.

        GroupChanged if one of its collectives has failed: nothing is to continue from what that
        code has made of the state. On the devices of `parameters` they may still run.
        """
        if not self.is_whole and issued() != self._begun:
            was_held = self._run.is_held
            self._run.is_held = False
            _check_collectives(groups, context, parameters)
            self._run.is_held = was_held
            self._note_late()
        self.is_whole = True
        self._kept = self._weights = None

    def _note_late(self) -> None:
        if not self._follows_commit or self.calls_late:
            return
        self.calls_late = True
        if not self.is_small:
            log.info(
                "collectives follow optimizer.step(): if a worker is lost in one of them, training "
                "continues from the newest snapshot; call them before the step, or use train.log"
            )

    def step_settled(self, keep: Callable[[], None]) -> None:
        """Code of the user's runs from here on, between the exchange of a step and its commit.

        Args:
            keep: keeps a copy of the state, see `keep`.
        """
        if self._calls_early is not False and self.is_small:
            keep()
            self.is_whole = self._kept is None
        self._begun, self._follows_commit = issued(), False

    def check_settled(
        self, groups: GroupProvider, context: WorkerContext, parameters: Iterable[torch.Tensor]
    ) -> None:
        """That code is through, and the step is to be committed; arguments as those of `end_code`.

        Raises:
            GroupChanged: a collective of it has failed: gradients may hold a part of its sum.
        """
        has_called = issued() != self._begun
        if has_called:
            _check_collectives(groups, context, parameters)
        self._calls_early = has_called or bool(self._calls_early)
        self.is_whole = True
        self._kept = self._weights = None

    # ------------------------------------------------------------------- what was kept

    def undo_code(self, shielded: Callable[[], AbstractContextManager[Any]]) -> None:
        """Undo what code of the user's has done since `keep`: the state had all of it already.

        UsageError if it has changed weights, of which there is no copy.
        """
        if self._kept is None:
            return  # The log says why.
        kept = self._copy()
        if kept is None:
            raise weights_changed(self._run.cursor)
        with shielded():
            self._run.objects.put(kept.state, own=False)

    def take(
        self, program_points: tuple[ProgramPoint, ...], agreed: Generation, *, has_raised: bool
    ) -> ResumeState | None:
        """Return what the next call continues from if this one is left now, None if nothing.

        Args:
            program_points: as in `keep`.
            agreed: the group that has agreed on the state at hand, if the next call is made in it;
                else `NO_GENERATION`.
            has_raised: this call was left by an error. If not, it is behind the loop that it has
                left after a commit.
        """
        run = self._run
        # What is sharded comes from the memory of all nodes, or from storage.
        if self.given is not None or run.objects.is_sharded:
            return self.given
        if not self.is_whole and (has_raised or self._kept is not None):
            return self._copy()
        if not run.is_held:
            return None
        run.logbook.forget_step()
        try:
            state = run.objects.take()
        except Exception as error:  # Of what the user has registered.
            if agreed:  # The others count on this member.
                raise
            log.warning("state_not_kept reason=%r", str(error))
            return None
        return self._resume_state(state, run.logbook, program_points, agreed)

    def _copy(self) -> ResumeState | None:
        """Return the kept state; None if weights that are not part of it have changed since."""
        if self._weights is None:
            return self._kept
        try:
            return self._kept if self._weights == self._divergence.weights() else None
        except Exception as error:  # The script has moved them, say to "meta".
            log.warning("weights_unreadable reason=%r", str(error))
            return None

    def _resume_state(
        self,
        state: State,
        logbook: Logbook,
        program_points: tuple[ProgramPoint, ...],
        agreed: Generation = NO_GENERATION,
    ) -> ResumeState:
        run = self._run
        return ResumeState(
            state,
            run.cursor,
            logbook,
            agreed,
            program_points,
            run.steps,
            run.streams,
            self.calls_late,
            run.begun,
            run.begun_step,
            run.cut,
            run.agreed_in,
            run.committed_in,
        )


def _check_collectives(
    groups: GroupProvider, context: WorkerContext, parameters: Iterable[torch.Tensor]
) -> None:
    """Wait until devices have run the script's collectives, which may have failed."""

    def check() -> None:
        if groups.has_failed(context.generation):
            raise GroupChanged("the group broke in code of the script's", context.generation)

    if not all_by_gloo():  # NCCL's calls return before, and aborts end them without an error.
        with context.activity.waiting():
            wait_done(record(dict.fromkeys(one.device for one in parameters)), check)
    check()
