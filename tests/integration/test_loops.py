"""Training loops as people write them, in real groups of one to three ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.members import Crew, all_ask

CREW = Crew()


@pytest.fixture(autouse=True, scope="module")
def _crew_goes_home() -> Iterator[None]:
    CREW.take(3)  # They start at the same time.
    yield
    CREW.end()


def trained(size: int, name: str, **arguments: Any) -> list[Any]:
    """Return what each rank of such a loop returned."""
    members = CREW.take(size)
    answers = CREW.form(members)
    assert not any(one.error for one in answers), [one.error for one in answers]
    return all_ask(members, "loop", name=name, **arguments)


def refused(size: int, name: str, **arguments: Any) -> str:
    """Return what such a loop is refused with, by all ranks."""
    with pytest.raises(AssertionError) as caught:
        trained(size, name, **arguments)
    text = str(caught.value)
    assert text.count("UsageError: ") == size, text
    return text


# --------------------------------------------------------------------------- ranks that differ


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    (alone,) = trained(1, "differing", what="bit", ranks=[])
    return dict(alone)


@pytest.mark.parametrize("what", ["bit", "buffer", "average", "counter"])
@pytest.mark.parametrize("at", [2, 8])  # In an epoch, and after the last step of the run.
def test_one_rank_that_differs_gets_the_state_of_the_others(
    what: str, at: int, undisturbed: dict[str, Any]
) -> None:
    said = trained(3, "differing", what=what, ranks=[1], at=at)
    assert [one["bits"] for one in said] == [undisturbed["bits"]] * 3
    assert [one["count"] for one in said] == [undisturbed["count"]] * 3
    assert [one["logged"] for one in said] == [undisturbed["logged"]] * 3


@pytest.mark.parametrize(
    ("size", "what", "says"),
    [
        (2, "gradient", r"module.2.bias: rank 0 and rank 1 have different values"),
        (3, "bit", r"module.2.weight: rank 0 and rank 1, 2 have different values"),
        (2, "buffer", r"module.1.running_mean (buffer): rank 0 and rank 1"),
        (2, "average", "registered average: module.0.weight: rank 0 and rank 1"),
        (3, "counter", "registered counter: rank 0 and rank 1, 2"),
    ],
)
def test_ranks_of_which_nobody_knows_who_is_right_are_refused(
    size: int, what: str, says: str
) -> None:
    assert says in refused(size, "differing", what=what, ranks=[*range(size)])


def test_a_rank_that_goes_on_to_differ_is_refused() -> None:
    text = refused(3, "differing", what="gradient", ranks=[2], times=100)
    assert "module.2.bias: rank 2 and the other ranks have different values" in text
    assert "3 times before, and the others' state has not helped" in text


# --------------------------------------------------------------------------- the usual loops


@pytest.mark.parametrize(
    "how",
    [
        "several_optimizers_and_schedulers",
        "scaler_and_clipping",
        "noise_on_gradients",
        "early_exits",
        "distributed_sampler",
        "weighted_sampler",
        "torchs_batch_sampler",
        "own_batch_sampler",
        "gradual_unfreezing",
        "no_sync",
    ],
)
def test_a_usual_loop_ends_with_the_same_bits_at_every_world_size(how: str) -> None:
    (alone,) = trained(1, "usual", how=how)
    for size in (2, 3):
        assert trained(size, "usual", how=how) == [alone] * size


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("accumulation_by_hand", "step() was not called in step 0.*global_batch_size"),
        ("closure", "LBFGS.step(closure).*call loss.backward() and then step()"),
        (
            "collective_in_each_micro_batch",
            "a collective was called in a micro-batch of step 0.*3, of which 2 workers have",
        ),
        ("batches_left_out", "step() was not called in step 0.*zero_grad() and step()"),
        ("unfrozen_within_an_epoch", "0.weight: required no gradient.*between two epochs"),
        ("forgotten_optimizer", "change module.2.weight.*prepare_optimizer(optimizer)"),
        ("steps_by_hand", "module.2.weight and 1 more: forward, or code.*prepare_optimizer"),
        ("sampler_of_each_rank", "the order of the loader's samples: rank 0 and rank 1.*draw"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_line_to_write(how: str, says: str) -> None:
    text = refused(2, "usual", how=how)
    for part in says.split(".*"):
        assert part in text


# --------------------------------------------------------------------------- those who leave


def test_who_leaves_by_plan_takes_nothing_along_that_it_has_logged() -> None:
    undisturbed = trained(2, "leaving", asked=False)
    assert trained(2, "leaving", asked=True) == undisturbed
    assert len({step for step, known in undisturbed[0] if known}) > 1


# --------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("where", ["loop", "after it"])
def test_what_is_evaluated_is_the_same_at_every_world_size(where: str) -> None:
    (alone,) = trained(1, "evaluating", where=where)
    for size in (2, 3):
        assert trained(size, "evaluating", where=where) == [alone] * size


def test_gathering_inside_the_loop_over_a_loader_is_refused() -> None:
    text = refused(2, "evaluating", where="inside the pass")
    assert "call train.gather_for_metrics(list) once, after the loop" in text


def test_a_loop_by_rank_trains_with_all_and_evaluates_each_once() -> None:
    first, second, third = trained(3, "by_rank")
    assert first[0] == second[0] == third[0]
    seen = [number for one in (first, second, third) for number in one[1]]
    assert {seen.count(number) for number in range(40)} <= {2, 3, 4}
    assert len(seen) == 2 * 42
    assert all(one[2] == list(range(40)) for one in (first, second, third))
