"""What an inner DataLoader answers, by key: from anywhere, in the order asked for.

One inner DataLoader reads, as long as this one exists. Its batch sampler never ends: whenever
torch asks for something to prefetch, it gets what will be wanted next and was not asked for yet.

Rule: what an answer is, is never concluded from when it comes alone. It carries the tag of its
request, and an inner DataLoader whose answers do not match the requests is begun anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from elastic.core.policy.seeds import derive
from elastic.errors import UsageError, check
from elastic.worker.data.attributes import attributes_print
from elastic.worker.data.seeding import LoaderWorkerInit

log = logging.getLogger(__name__)

LOST_PROCESS = "DataLoader worker (pid"
"""How torch's error for that begins; an error of a dataset names its class first."""

WORKER_PROCESSES = 3
"""Purpose of the seed of worker processes, beside those in seeds.py."""

Key = tuple[int, int, int]
"""Epoch, step, micro-batch. In the order of keys a rank computes."""
NOTHING = -1
"""Epoch of the keys of what is asked only to pass a turn; no plan wants them."""


class ReadPlan(Protocol):
    """The endless order in which micro-batches are wanted."""

    @property
    def key(self) -> Key: ...

    def wants(self, key: Key) -> bool:
        """Return whether a micro-batch is wanted, now or later."""
        ...

    def pieces(self, key: Key) -> Iterator[Any]:
        """Yield what is wanted from a micro-batch on, endlessly."""
        ...


class InnerLoader(Protocol):
    """What is read: the two ends of an inner DataLoader, and what goes between them.

    Attributes:
        dataset: reads requests in `__getitems__`.
        collate: makes (tag of the request, value) of what the dataset returned.
    """

    dataset: Any
    collate: Any

    def processes(self, allowed: int) -> int:
        """Return how many worker processes can be of use, at most those that are allowed."""
        ...

    def request(self, tag: int, piece: Any) -> Any:
        """Return the request for a piece; None is a skipped turn."""
        ...

    def turn_of(self, key: Key) -> int | None:
        """Return the number of the reader that must read this, None if any may.

        The worker process of that number, counted modulo their number.
        """
        ...


class SampleFeed:
    """Yields what a plan wants, and changes plans without reading twice what both want.

    What was handed out already, and is wanted again because its step is done again, is read
    again: the training loop may have changed its tensors.
    """

    def __init__(self, loader: DataLoader[Any], reading: InnerLoader, *, seed: int) -> None:
        """Take over what the user's loader does; nothing is started before the first `take`.

        Its arguments are kept. Two have no effect: batches come in order whatever
        `in_order` is, and worker processes persist whatever `persistent_workers` is.

        Args:
            loader: the user's; it is not read itself.
            reading: what is read instead.
            seed: of the worker processes; 0 <= seed < 2**63.
        """
        self._users, self._reading, self._seed = loader, reading, seed
        self._num_processes = reading.processes(loader.num_workers)
        self._plan: ReadPlan | None = None
        self._ahead: Iterator[Any] = iter(())
        # Read, and not in turn yet.
        self._next_piece: Any = None
        # In the order in which the inner loader answers.
        self._requested: dict[Key, int] = {}
        self._ready: dict[Key, Any] = {}
        self._inner: Any = None
        self._is_suspect = False
        # Ever, which makes the tags, and since the inner loader began, which makes the turns.
        self._num_requested = self._num_turns = 0
        # Of the user's dataset, as the worker processes have it.
        self._print = 0
        self._is_closed = False

    def follow(self, plan: ReadPlan) -> None:
        """Let `take` continue with this plan; what is ready and still wanted is kept."""
        self._plan = plan
        self._ready = {key: value for key, value in self._ready.items() if plan.wants(key)}
        self._check_ahead()

    def take(self) -> Any:
        """Return what the plan wants now; the caller advances the plan.

        Raises what the dataset or the collate_fn raised, as DataLoader does; the next call tries
        the same once more.
        """
        check(not self._is_closed, "a loader was read after it was closed")
        key = self._the_plan().key
        while key not in self._ready:
            self._receive(key)
            if key not in self._ready and key not in self._requested:
                self._check_ahead()  # It had come, and an interrupt or an error took it away.
        return self._ready.pop(key)

    def refresh(self, *, is_stale: bool = False) -> bool:
        """Begin the worker processes anew if what they have copies of has changed; return whether.

        As DataLoader does for each pass over the data, for scripts that change their dataset
        between passes; what was read ahead is forgotten then, and in any case if it `is_stale`.
        """
        if not self._num_processes or (self._inner is None and not self._ready):
            return False
        if not is_stale and self._print == self._print_now():
            return False
        self._stop()
        self._ready = {}
        return True

    def _print_now(self) -> int:
        return attributes_print([self._users.dataset, self._users.collate_fn])

    def close(self) -> None:
        """End the worker processes and forget what they read; again is no harm."""
        self._is_closed = True
        self._ready = {}
        self._stop()

    # ------------------------------------------------------------------- the inner loader

    def _receive(self, wanted: Key) -> None:
        """Take one answer of the inner loader, and keep it if it is still wanted."""
        if self._inner is None or self._is_suspect:
            self._start()
        before = self._num_requested
        # Until the answer is complete: an interrupt, a signal's exception, a dead process, a
        # timeout leave us not knowing what was answered.
        self._is_suspect = True
        try:
            tag, value = next(self._inner)
        except Exception as error:
            # Torch asks for more as soon as an answer is there, and only then. It reports a lost
            # process from a signal handler, which may be right behind that.
            if self._num_requested == before or str(error).startswith(LOST_PROCESS):
                raise
            failed = self._answered()[0]
            self._check_ahead()
            self._is_suspect = False
            if failed == wanted:
                raise
            log.debug("sample_error_ignored micro_batch=%s wanted=%s %r", failed, wanted, error)
            return
        key, expected = self._answered()
        if tag != expected:
            log.warning("loader_out_of_step micro_batch=%s; its processes start anew", key)
            return
        if self._the_plan().wants(key):
            self._ready[key] = value
        self._is_suspect = False

    def _answered(self) -> tuple[Key, int]:
        check(self._requested, "the inner loader answers what was not asked")
        key = next(iter(self._requested))
        return key, self._requested.pop(key)

    def _next_request(self) -> Any:
        """Return what is wanted next and neither there nor on its way; torch calls this."""
        now = self._the_plan().key
        piece = self._next_piece or next(self._ahead)
        # What was ready at a deal may have been handed out since.
        while piece.key < now or piece.key in self._requested or piece.key in self._ready:
            piece = next(self._ahead)
        self._next_piece = piece
        tag = self._num_requested = self._num_requested + 1
        turn, self._num_turns = self._num_turns, self._num_turns + 1
        reader = self._reading.turn_of(piece.key)
        # Torch hands requests to its worker processes by turns.
        if reader is not None and (reader - turn) % max(1, self._num_processes):
            self._requested[NOTHING, NOTHING, tag] = tag
            return self._reading.request(tag, None)
        self._next_piece = None
        self._requested[piece.key] = tag
        return self._reading.request(tag, piece)

    def _check_ahead(self) -> None:
        """Restart the search for the next request; answered and pending ones are skipped."""
        plan = self._the_plan()
        self._ahead, self._next_piece = plan.pieces(plan.key), None

    def _start(self) -> None:
        self._stop()
        users = self._users
        number = self._num_processes
        kept: dict[str, Any] = {"num_workers": number, "timeout": users.timeout}
        if number:
            # As much in all as the user's would.
            kept["prefetch_factor"] = -(-(users.prefetch_factor or 1) * users.num_workers // number)
            kept["multiprocessing_context"] = users.multiprocessing_context
            kept["worker_init_fn"] = LoaderWorkerInit(users.worker_init_fn)
        if users.pin_memory and torch.accelerator.is_available():
            kept["pin_memory"] = True
            if users.pin_memory_device:
                kept["pin_memory_device"] = users.pin_memory_device
        # Torch draws the worker processes' seed from it: not from the training's random state.
        own = torch.Generator().manual_seed(derive(self._seed, WORKER_PROCESSES))
        self._check_ahead()
        self._print = self._print_now() if number else 0
        self._inner = iter(
            DataLoader(
                self._reading.dataset,
                batch_sampler=_Endless(self._next_request),  # type: ignore[arg-type]
                collate_fn=self._reading.collate,
                generator=users.generator if users.generator is not None else own,
                **kept,
            )
        )
        self._is_suspect = False

    def _stop(self) -> None:
        inner, self._inner = self._inner, None
        self._requested, self._num_turns = {}, 0
        # Tracebacks may hold the iterator, so that letting go of it is not enough.
        end = getattr(inner, "_shutdown_workers", None)
        if end is not None:
            try:
                end()
            except RuntimeError as error:
                # Torch's handler of SIGCHLD reports a process that was killed while we end them.
                log.debug("process_lost_at_the_end error=%r", str(error))

    def _the_plan(self) -> ReadPlan:
        check(self._plan is not None, "a loader was read before micro-batches were dealt")
        return self._plan  # type: ignore[return-value]


class _Endless:
    """A batch sampler that asks what is next; unlike a generator it survives exceptions."""

    def __init__(self, next_request: Callable[[], Any]) -> None:
        self._next_request = next_request

    def __iter__(self) -> _Endless:
        return self

    def __next__(self) -> Any:
        return self._next_request()


def check_prefetch(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose worker processes would never be asked: nothing is prefetched."""
    if loader.num_workers and not loader.prefetch_factor:
        raise UsageError(
            f"prepare_data_loader: prefetch_factor={loader.prefetch_factor} with "
            f"num_workers={loader.num_workers} reads nothing at all; expected 1 or more"
        )
