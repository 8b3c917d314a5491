"""Nodes that write to different places are found out at the start; who knows asks nobody again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from elastic.core.facts import Assignment, JobId, WorkerId
from elastic.errors import StorageNotShared
from elastic.storage.run_directory import RunDirectory
from elastic.worker.checkpoint import shared_storage
from elastic.worker.checkpoint.shared_storage import SharedStorage
from tests.harness.faulty_storage import Faults
from tests.patience import DEADLINE_S

NEVER: Callable[[], bool] = lambda: False  # noqa: E731


def place(rank: int, *, nodes: int = 2, generation: int = 1) -> Assignment:
    """Return the place of a member, each on a node of its own."""
    return Assignment(
        JobId("j1"), WorkerId(f"n{rank}/1"), generation, rank, nodes, 0, 1, rank, nodes,
        leader_address="",
    )  # fmt: skip


def synchronize(*storages: SharedStorage, store: dist.Store | None = None) -> list[Future[None]]:
    """Let these be the ranks of a group, and return how each of them fared."""
    store = store or dist.HashStore()
    with ThreadPoolExecutor(len(storages)) as pool:
        futures = [
            pool.submit(one.check, place(rank, nodes=len(storages)), store, is_over=NEVER)
            for rank, one in enumerate(storages)
        ]
    return futures


def at(path: Path | str, patience_s: float = 0) -> SharedStorage:
    return SharedStorage(RunDirectory(str(path), patience_s=patience_s))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_storage, "POLLS_S", 0.2)
    monkeypatch.setattr(shared_storage, "POLL_PAUSE_S", 0.02)


def test_nodes_that_share_a_directory_train(tmp_path: Path) -> None:
    for future in synchronize(at(tmp_path), at(tmp_path), at(f"{tmp_path}/")):
        assert future.exception() is None
    assert (tmp_path / ".shared-j1").read_text() == "n0/1\n"


def test_a_node_with_another_directory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    leader, other = synchronize(at(tmp_path / "a"), at(tmp_path / "b"))
    assert leader.exception() is None
    error = other.exception()
    assert isinstance(error, StorageNotShared)
    assert str(error).startswith("node n1 (rank 1) does not see what rank 0 wrote")
    assert str(tmp_path / "b") in str(error)
    assert "--storage-path" in str(error)


def test_one_node_and_no_directory_ask_nothing(tmp_path: Path) -> None:
    at(tmp_path).check(place(0, nodes=1), dist.HashStore(), is_over=NEVER)
    SharedStorage(None).check(place(0), dist.HashStore(), is_over=NEVER)
    assert not list(tmp_path.iterdir())


def test_who_knows_neither_reads_nor_writes_again(tmp_path: Path) -> None:
    faults = Faults(tmp_path)
    leader, other = at(f"faulty://{tmp_path}/run"), at(f"faulty://{tmp_path}/run")
    for future in synchronize(leader, other):
        assert future.exception() is None
    touched = faults.add("io")
    store = dist.HashStore()
    other.check(place(1, generation=2), store, is_over=NEVER)
    leader.check(place(0, generation=2), store, is_over=NEVER)
    assert faults.hits(touched) == 0
    # A newcomer of that generation finds the word already said.
    faults.remove()
    at(f"faulty://{tmp_path}/run").check(place(1, generation=2), store, is_over=NEVER)


def test_storage_that_fails_says_nothing_about_being_shared(tmp_path: Path) -> None:
    faults = Faults(tmp_path)
    refuses = faults.add("denied", on="write")
    for future in synchronize(at(f"faulty://{tmp_path}/run"), at(f"faulty://{tmp_path}/run")):
        assert future.exception() is None
    faults.remove(refuses)
    faults.add("denied", on="read")
    for future in synchronize(at(f"faulty://{tmp_path}/run"), at(f"faulty://{tmp_path}/run")):
        assert future.exception() is None


def test_a_group_that_is_over_is_not_waited_for(tmp_path: Path) -> None:
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        store = dist.HashStore()
        waiting = pool.submit(at(tmp_path).check, place(1), store, is_over=over.is_set)
        over.set()
        assert waiting.result(DEADLINE_S) is None
