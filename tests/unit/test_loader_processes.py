"""A micro-batch loader with worker processes: they live on, read nothing in vain, and may fail."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from elastic.core.policy.cursor import Cursor
from elastic.worker.loader import MicroBatchLoader

pytestmark = [
    # Python 3.12 remarks on every fork of a process that has used torch.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
DEADLINE_S = 60.0
V = 4
MICRO = 2


class Recorded(Dataset[tuple[int, int]]):
    """Samples are (number, pid of the reader); every read leaves a line in a file.

    A number that has a file of its own fails, or waits until that file is gone.
    """

    def __init__(self, folder: Path, size: int = 4000) -> None:
        self.folder = folder
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[int, int]:
        record = os.open(self.folder / "reads", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(record, f"{number}\n".encode())
        os.close(record)
        if (self.folder / f"fails-{number}").exists():
            raise ValueError(f"sample {number} is torn")
        wait_until_gone(self.folder / f"waits-{number}")
        return number, os.getpid()

    def reads(self) -> Counter[int]:
        return Counter(int(line) for line in (self.folder / "reads").read_text().split())


def wait_until_gone(path: Path) -> None:
    until = time.monotonic() + DEADLINE_S
    while path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def wait_until_dead(process: psutil.Process) -> None:
    until = time.monotonic() + DEADLINE_S
    while process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, f"{process} lives on"
        time.sleep(0.01)


@contextmanager
def loading(data: Dataset[Any], **kept: Any) -> Iterator[MicroBatchLoader]:
    kept = {"num_workers": 2, **kept}
    plain = DataLoader(data, batch_size=MICRO, **kept)
    loader = MicroBatchLoader(plain, num_micro_batches=V, seed=3)
    try:
        yield loader
    finally:
        loader.close()


def ids(epoch_step: Cursor, number: int, loader: MicroBatchLoader) -> list[int]:
    return list(loader.epochs.samples(epoch_step.epoch, epoch_step.step, number))


def take(loader: MicroBatchLoader, count: int) -> Iterator[tuple[list[int], set[int]]]:
    """Micro-batches, each checked against its number: sample ids and readers."""
    for _ in range(count):
        batch = loader.next()
        numbers, pids = (part.tolist() for part in batch.value)
        assert numbers[: batch.count] == ids(batch.cursor, batch.micro_batch, loader)
        yield numbers, set(pids)


def test_processes_outlive_deals_and_epochs_and_end_with_the_loader(tmp_path: Path) -> None:
    draw = random.Random(7)
    with loading(Recorded(tmp_path, 50), shuffle=True, prefetch_factor=3) as loader:
        readers: set[int] = set()
        for _ in range(40):
            first = draw.randrange(V)
            cursor = Cursor(draw.randrange(3), draw.randrange(loader.epochs.steps))
            loader.deal(cursor, (first, draw.randrange(first, V) + 1))
            for _, pids in take(loader, draw.randrange(12)):
                readers |= pids
        assert len(readers) == 2
        assert all(psutil.pid_exists(pid) for pid in readers)
    assert not any(psutil.pid_exists(pid) for pid in readers)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_what_is_still_wanted_after_a_deal_is_not_read_again(tmp_path: Path, prefetch: int) -> None:
    data = Recorded(tmp_path)
    with loading(data, prefetch_factor=prefetch) as loader:
        loader.deal(Cursor(), (0, 4))
        seen = [number for numbers, _ in take(loader, 6) for number in numbers]
        # 8 -> 5 -> 3 -> 7 and the like: the same step, others of its micro-batches.
        for cursor, held, count in (
            (Cursor(0, 1), (2, 4), 4), (Cursor(0, 3), (1, 4), 1), (Cursor(0, 3), (2, 4), 5),
            (Cursor(0, 6), (0, 4), 9),
        ):  # fmt: skip
            loader.deal(cursor, held)
            seen += [number for numbers, _ in take(loader, count) for number in numbers]
        # Handed out once each: were one of them read twice, it was thrown away in between.
        assert Counter(seen).most_common(1)[0][1] == 1
        reads = data.reads()
        assert {number: reads[number] for number in seen} == dict.fromkeys(seen, 1)


def test_what_was_prefetched_waits_until_its_turn_in_an_earlier_deal(tmp_path: Path) -> None:
    data = Recorded(tmp_path)
    with loading(data, prefetch_factor=2) as loader:
        loader.deal(Cursor(0, 3), (0, 4))
        (again,) = [numbers for numbers, _ in take(loader, 1)]
        loader.deal(Cursor(0, 1), (0, 4))
        seen = [number for numbers, _ in take(loader, 16) for number in numbers]
        reads = data.reads()
        # What was handed out belongs to the loop, which may have changed it.
        assert {number for number in seen if reads[number] != 1} == set(again)


def test_the_same_deal_once_more_changes_nothing(tmp_path: Path) -> None:
    data = Recorded(tmp_path, 16)
    with loading(data) as loader:
        for epoch in range(3):
            loader.deal(Cursor(epoch, 0), (0, 4))
            assert len(list(take(loader, 8))) == 8
        assert all(count in (3, 4) for count in data.reads().values())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_dataset_comes_out_and_reading_goes_on(
    tmp_path: Path, num_workers: int
) -> None:
    torn = tmp_path / "fails-5"
    torn.touch()
    with loading(Recorded(tmp_path), num_workers=num_workers) as loader:
        loader.deal(Cursor(), (0, 4))
        readers = set().union(*(pids for _, pids in take(loader, 2)))
        for _ in range(2):
            with pytest.raises(ValueError, match="sample 5 is torn"):
                loader.next()
        torn.unlink()
        assert [numbers for numbers, _ in take(loader, 3)] == [[4, 5], [6, 7], [8, 9]]
        loader.deal(Cursor(0, 7), (1, 2))
        for _, pids in take(loader, 4):
            readers |= pids
        assert len(readers) == max(1, num_workers)


def test_an_error_in_what_is_no_longer_wanted_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "fails-3").touch()
    with loading(Recorded(tmp_path)) as loader:
        loader.deal(Cursor(), (0, 4))
        assert len(list(take(loader, 1))) == 1
        loader.deal(Cursor(0, 1), (0, 4))
        assert len(list(take(loader, 8))) == 8


def test_an_error_in_what_is_wanted_later_is_reported_in_its_turn(tmp_path: Path) -> None:
    (tmp_path / "fails-19").touch()
    with loading(Recorded(tmp_path)) as loader:
        loader.deal(Cursor(0, 2), (0, 4))
        assert len(list(take(loader, 1))) == 1
        loader.deal(Cursor(0, 1), (0, 4))
        assert len(list(take(loader, 5))) == 5
        with pytest.raises(ValueError, match="sample 19 is torn"):
            loader.next()


@contextmanager
def deaf_to_children() -> Iterator[None]:
    """Have torch not hear of dead processes by signals.

    It would raise from its handler wherever Python happens to be at that moment, also where the
    loader has found out by itself, and whenever another child of ours ends.
    """
    hears = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, hears)


def kill_and_read(pids: set[int], loader: MicroBatchLoader) -> None:
    """Read until a process is missed."""
    process = psutil.Process(min(pids))
    process.kill()
    wait_until_dead(process)
    for _ in range(8):
        loader.next()


def test_killed_processes_are_an_error_after_which_others_read_on(tmp_path: Path) -> None:
    (tmp_path / "waits-20").touch()
    with loading(Recorded(tmp_path)) as loader:
        loader.deal(Cursor(), (0, 4))
        readers = set().union(*(pids for _, pids in take(loader, 4)))
        # Torch's words, or those of the socket over which it asks the process for an answer.
        missed = "exited unexpectedly|killed by signal|reset by peer|refused|^$"
        with deaf_to_children():
            with pytest.raises((RuntimeError, OSError, EOFError), match=missed):
                kill_and_read(readers, loader)
            (tmp_path / "waits-20").unlink()
            at = loader.next()
        assert at.value[0].tolist() == ids(at.cursor, at.micro_batch, loader)
        later = set().union(*(pids for _, pids in take(loader, 20)))
        assert not later & readers


def test_a_timeout_is_an_error_after_which_the_same_is_tried_again(tmp_path: Path) -> None:
    slow = tmp_path / "waits-6"
    slow.touch()
    with loading(Recorded(tmp_path), timeout=0.3) as loader:
        loader.deal(Cursor(), (0, 4))
        assert len(list(take(loader, 3))) == 3
        with pytest.raises(RuntimeError, match="timed out"):
            loader.next()
        slow.unlink()
        assert [numbers for numbers, _ in take(loader, 2)] == [[6, 7], [8, 9]]


class Leaving(BaseException):
    """Stands for what takes a training loop out of whatever it does."""


def leave(*_: Any) -> None:
    raise Leaving


def leave_when_it_waits() -> None:
    """Interrupt the main thread once it waits for an answer."""
    main = threading.main_thread().ident
    assert main is not None
    until = time.monotonic() + DEADLINE_S
    while not sys._current_frames()[main].f_code.co_filename.endswith("selectors.py"):
        assert time.monotonic() < until, "it does not wait"
    signal.pthread_kill(main, signal.SIGUSR1)


def test_after_an_interrupt_the_same_is_tried_again(tmp_path: Path) -> None:
    slow = tmp_path / "waits-6"
    slow.touch()
    before = signal.signal(signal.SIGUSR1, leave)
    leaves = threading.Thread(target=leave_when_it_waits)
    try:
        with loading(Recorded(tmp_path)) as loader:
            loader.deal(Cursor(), (0, 4))
            assert len(list(take(loader, 3))) == 3
            leaves.start()
            with pytest.raises(Leaving):
                loader.next()
            slow.unlink()
            assert [numbers for numbers, _ in take(loader, 3)] == [[6, 7], [8, 9], [10, 11]]
    finally:
        leaves.join(DEADLINE_S)
        signal.signal(signal.SIGUSR1, before)


class Interrupted(Recorded):
    def __getitem__(self, number: int) -> tuple[int, int]:
        if (self.folder / f"leaves-{number}").exists():
            raise Leaving
        return super().__getitem__(number)


def test_after_an_interrupt_of_the_dataset_itself_the_same_is_tried_again(tmp_path: Path) -> None:
    leaves = tmp_path / "leaves-3"
    leaves.touch()
    with loading(Interrupted(tmp_path), num_workers=0) as loader:
        loader.deal(Cursor(), (0, 4))
        assert len(list(take(loader, 1))) == 1
        with pytest.raises(Leaving):
            loader.next()
        leaves.unlink()
        assert [numbers for numbers, _ in take(loader, 2)] == [[2, 3], [4, 5]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_memory_is_pinned_where_there_is_a_device_for_it(num_workers: int) -> None:
    data = TensorDataset(torch.arange(8))
    with loading(data, pin_memory=True, num_workers=num_workers) as loader:
        loader.deal(Cursor(), (0, 4))
        (value,) = loader.next().value
        assert value.tolist() == [0, 1]
        assert value.is_pinned() == torch.cuda.is_available()


def test_batches_come_in_order_whatever_in_order_says(tmp_path: Path) -> None:
    with loading(Recorded(tmp_path), in_order=False, persistent_workers=True) as loader:
        loader.deal(Cursor(), (0, 4))
        assert [numbers[0] for numbers, _ in take(loader, 10)] == list(range(0, 20, 2))
