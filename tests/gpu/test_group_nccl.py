"""The same promises with NCCL: aborted, freed, formed again, the process alive throughout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from tests.workers.members import Crew, MemberProcess, all_ask, stop  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
CREW = Crew()


@pytest.fixture(autouse=True, scope="module")
def _crew_goes_home() -> Iterator[None]:
    yield
    CREW.end()


def formed(members: list[MemberProcess], backend: str) -> None:
    for index, one in enumerate(members):
        one.ask("use_device", index=index)
    answers = CREW.form(members, backend=backend)
    assert not any(one.error for one in answers), [one.error for one in answers]
    right = len(members) * (len(members) + 1) / 2
    assert all_ask(members, "cuda_reduce") == [right] * len(members)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_member_that_waits_for_a_lost_one_is_freed_and_goes_on(backend: str, how: str) -> None:
    members = CREW.take(2)
    formed(members, backend)
    survivor, lost = members
    pid = survivor.ask("state")["pid"]
    order = survivor.tell("cuda_reduce")
    survivor.ask("hung_up")
    if how == "killed":
        lost.process.kill()
    else:
        stop(lost)
    survivor.ask("abort")
    # NCCL frees it without an error: what counts is that it comes back at all.
    survivor.answer(order)
    CREW.retire(lost)
    formed([survivor], backend)
    assert survivor.ask("state")["pid"] == pid


def test_ten_groups_in_the_same_processes() -> None:
    members = CREW.take(2)
    for _ in range(10):
        formed(members, "cpu:gloo,cuda:nccl")
        all_ask(members, "abort")
