"""Members that meet: who cannot train together is told why, and nobody else is."""

from __future__ import annotations

import pytest

from elastic.core.policy.cursor import Cursor
from elastic.core.policy.recovery import PassPosition, RunPosition
from elastic.errors import UsageError
from elastic.worker.engine.engine_parts import EpochLoop, PassPhase
from elastic.worker.engine.state_recovery import MemberInfo, check_alike


def told(
    model: int = 7,
    data: int = 0,
    epoch: int = 0,
    step: int = 0,
    *,
    reduced: int = 0,
    in_pass: PassPosition = PassPosition.ITERATIONS,
) -> MemberInfo:
    position = RunPosition(True, Cursor(epoch, step), in_pass=in_pass)
    return MemberInfo(position, model, data, 1, reduced)


def test_other_parameters_are_refused_by_the_rank_that_has_them() -> None:
    with pytest.raises(UsageError, match="rank 2 has prepared other parameters than rank 0"):
        check_alike([told(), told(), told(model=8)])


def test_other_parameters_that_are_trained_are_refused_within_a_pass() -> None:
    ahead = told(reduced=1, epoch=1, in_pass=PassPosition.NO)
    check_alike([told(reduced=2, epoch=1), ahead, told(reduced=1, step=3)])
    with pytest.raises(UsageError, match="rank 2 and rank 0 began epoch 1 with other frozen"):
        check_alike([told(reduced=2, epoch=1), ahead, told(reduced=3, epoch=1)])


def test_other_data_in_the_same_epoch_is_refused() -> None:
    with pytest.raises(UsageError, match="ranks 0, 2 have data sets of different length"):
        check_alike([told(data=1), told(), told(data=3)])


def test_whoever_does_not_know_its_data_yet_is_no_stranger() -> None:
    check_alike([told(data=5), told(), told(data=5, step=1)])


def test_epochs_may_have_loaders_of_their_own() -> None:
    check_alike([told(data=5, epoch=0, step=9), told(data=6, epoch=1), told(data=5, step=9)])
    with pytest.raises(UsageError, match="ranks 1, 3 have"):
        check_alike([told(data=5), told(data=6, epoch=1), told(data=5), told(data=8, epoch=1)])


def test_code_behind_a_pass_that_was_left_has_a_place_of_its_own() -> None:
    """A place that came again would give a report the key of an earlier one."""
    loop, cursor = EpochLoop(epoch=0, by_steps=True, pass_phase=PassPhase.OPEN), Cursor(0, 3)
    points = [loop.program_point(cursor, in_step=True), loop.program_point(cursor, in_step=False)]
    loop.pass_phase = PassPhase.LEFT
    points.append(loop.program_point(cursor, in_step=False))
    assert sorted(set(points)) == points
