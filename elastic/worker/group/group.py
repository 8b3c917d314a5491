"""torch.distributed groups that form, break and form again inside one living process.

Rule: the main thread never waits inside torch for something that only a peer can end. Connecting
and forming run in a thread that can be left behind; a collective is freed by shutting the group's
sockets down, or given up (see `abortable_wait`). So `abort`, from any thread
at any moment, gives the main thread back within milliseconds, and the old group is dropped, never
destroyed, on the way to the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore

from elastic.core.facts import NO_GENERATION
from elastic.errors import ConfigError, GroupError, InvariantViolation
from elastic.runtime.worker_ports import ANY_PORT, PortRange
from elastic.worker.base.torch_names import TORCH_RANGE
from elastic.worker.group import c10d, connections
from elastic.worker.group.abortable_wait import AbortableWait
from elastic.worker.group.background_saves import BackgroundSaves
from elastic.worker.group.gloo_port import binding_within
from elastic.worker.group.gloo_sockets import (
    WatchedDescriptor,
    ends_print,
    find_event_loop,
    open_listener,
    shut_listener,
    socket_inodes,
)
from elastic.worker.group.group_resources import FORGOTTEN_S, BackgroundReaper, GroupResources
from elastic.worker.group.group_store import GroupStore, StoreAddress

log = logging.getLogger(__name__)

Made = TypeVar("Made")

BOTH_BACKENDS = "cpu:gloo,cuda:nccl"
"""With accelerators: tensors may be on either side, and gloo's connections show a lost peer."""
BACKENDS = ("gloo", "nccl", BOTH_BACKENDS)
NCCL_ABORT_S = 30.0
"""An abort of NCCL that takes longer will not end; the process has to."""
LISTEN_ATTEMPTS = 3
HURRY_S = 1e-4
"""How long a thread in a hurry waits for the interpreter; Python's own value is 5 ms."""


def _prefix(spec: GroupSpec) -> str:
    """Return what all keys of a group begin with."""
    return f"{spec.job_id}/{spec.generation}"


@dataclass(frozen=True)
class GroupSpec:
    """One worker's place in one group.

    Attributes:
        generation: >= 1; a group of a later generation has a greater number.
        rank: 0 to world_size - 1.
        world_size: >= 1.
        leader_address: "host:port" of the leader's `StoreServer`.
        backend: "gloo", "nccl" or "cpu:gloo,cuda:nccl".
        host: address of this machine that gloo binds to.
        timeout_s: of each collective; the backstop, not the detector.
        job_id: part of every store key.
        key: secret of the generation, by which members know each other.
        form_timeout_s: how long forming may take, at most `timeout_s`. Less than the coordinator's
            (60 s): a member that cannot form reports it, and is not taken for hung.
    """

    generation: int
    rank: int
    world_size: int
    leader_address: str
    backend: str
    host: str
    timeout_s: float
    job_id: str
    key: str = field(repr=False)
    ports: PortRange = ANY_PORT
    form_timeout_s: float = 45.0

    def __post_init__(self) -> None:
        if self.generation <= NO_GENERATION or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"generation={self.generation} rank={self.rank} world_size={self.world_size}: "
                f"expected generation >= 1 and 0 <= rank < world_size"
            )
        if not self.key:
            raise ConfigError(
                f"{self}: expected a secret of the generation, without which anybody could be a "
                f"member"
            )
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend={self.backend!r}: expected one of {', '.join(BACKENDS)}")
        if not (self.timeout_s > 0 and self.form_timeout_s > 0):
            raise ConfigError(
                f"timeout_s={self.timeout_s} form_timeout_s={self.form_timeout_s}: expected > 0"
            )

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.world_size}, generation {self.generation} of job "
            f"{self.job_id}, leader {self.leader_address}"
        )


class ProcessGroups:
    """The process's default group, one generation after the other.

    `form`, `drop`, `hide` and `show` are for the main thread; `abort`, `peer_hung_up` and
    `received_bytes` for any.
    """

    def __init__(self) -> None:
        """Take torch's seams (see `c10d`), so that no later import can pass them by.

        Raises:
            GroupError: this torch lacks what is needed.
        """
        self._lock = threading.Lock()
        self._abort_lock = threading.Lock()
        self._resources: GroupResources | None = None
        self._fence = NO_GENERATION
        self._reaper = BackgroundReaper()
        self._saves = BackgroundSaves()
        self._seams = c10d.TorchPatches(
            self._make_gloo,
            standing=self._standing,
            forget_subgroup=self._forget_subgroup,
            waits=AbortableWait(lambda: self._resources),
            begin_save=self._saves.begin,
        )
        self._seams.install()

    # ------------------------------------------------------------------------------- main thread

    def form(self, spec: GroupSpec) -> None:
        """Drop the old group and form this one as torch's default group.

        GroupError if it was not formed in time, or was aborted; torch.distributed is then as it was
        before any group.
        """
        self.drop()
        began = time.monotonic()
        limit_s = min(spec.timeout_s, spec.form_timeout_s)
        resources = GroupResources(deadline=began + limit_s, spec=spec)
        with self._lock:
            is_over = spec.generation <= self._fence
            if not is_over:
                self._resources = resources
        if is_over:
            raise GroupError(f"{spec}: not formed, this generation was aborted before it began")
        try:
            self._connect(resources, spec)
            self._init(resources, spec)
            if resources.aborted:
                raise GroupError("aborted by order")
        except BaseException as error:
            seconds = time.monotonic() - began
            self.drop()
            if not isinstance(error, Exception):
                raise
            raise GroupError(f"{spec}: not formed after {seconds:.1f} s: {error}") from error
        log.info(
            "group_formed generation=%d rank=%d world_size=%d backend=%s ms=%.1f",
            spec.generation, spec.rank, spec.world_size, spec.backend,
            (time.monotonic() - began) * 1e3,
        )  # fmt: skip

    def drop(self) -> None:
        """Forget the group, so that torch.distributed is as in a fresh process.

        Its connections are shut down, so all members must have left the group, or it must be
        broken. What torch holds is taken apart in the background, as far as user code releases it.
        Takes milliseconds.

        Raises:
            GroupError: gloo does not become idle, or NCCL does not release its communicators;
                the process must be replaced. So it is each time, until then.
        """
        resources = self._resources
        self._saves.forget()
        if resources is None:
            self._reaper.release_later(c10d.forget_all_groups())
            return
        self._abort(resources)
        connections.close_all()
        resources.abort_nccl()  # once more: a group may have been made while it was aborted
        if not resources.join_gloo():
            raise GroupError(
                f"{resources.spec}: gloo has forgotten a wait, or is still at work "
                f"{FORGOTTEN_S:.0f} s after the group is over, and may write where this process "
                f"trains; it must be replaced"
            )
        if not resources.join_nccl(NCCL_ABORT_S):
            raise GroupError(
                f"{resources.spec}: NCCL has not ended its communicators after "
                f"{NCCL_ABORT_S:.0f} s; this process cannot form another group and must be replaced"
            )
        with self._lock:
            self._resources = None
        self._reaper.release_later([resources, *c10d.forget_all_groups()], resources.release)

    def close(self) -> None:
        """Drop the group and give torch its own functions back; for the end of the process."""
        self.drop()
        self._seams.remove()
        self._reaper.close()

    def hide(self) -> None:
        """Let the script find no group until it asks for one; see `TorchPatches.hide`."""
        self._seams.hide()

    def show(self) -> None:
        """Let the script find a group for which it has not asked."""
        self._seams.show()

    @property
    def spec(self) -> GroupSpec | None:
        """The place in the group that is formed, None while there is none."""
        resources = self._resources
        return resources.spec if resources is not None and resources.is_formed else None

    @property
    def store(self) -> PrefixStore:
        """The group's key-value store, for the main thread; `abort` ends what waits in it.

        Raises:
            GroupError: no group is formed.
        """
        resources = self._resources
        if resources is None or resources.store is None or not resources.is_formed:
            raise GroupError("no group is formed, so there is no store; form one first")
        return PrefixStore(f"{_prefix(resources.spec)}/elastic", resources.store)

    # -------------------------------------------------------------------------------- any thread

    def abort(self, generation: int | None = None) -> None:
        """Free all threads blocked in the group, or in forming it; again is no harm.

        What was blocked raises: `GroupError` out of `form` and `new_group`, RuntimeError out of
        gloo collectives. NCCL collectives end without an error and with meaningless results, so
        with NCCL the main thread must be interrupted first (`Interrupter.interrupt`).

        Args:
            generation: abort this one and all before it, also one that `form` has not begun;
                a later one is left alone. None for the present one, whichever it is.
        """
        with self._lock:
            if generation is not None:
                self._fence = max(self._fence, generation)
            resources = self._resources
        if resources is not None and (
            generation is None or resources.spec.generation <= generation
        ):
            self._abort(resources)

    def peer_hung_up(self) -> bool:
        """Return whether the group is broken: aborted, or a connection to a member is gone.

        Distinguishes an error that a lost member caused from one of the user's own.
        """
        resources = self._resources
        return resources is not None and resources.is_broken()

    def over(self) -> GroupResources | None:
        """Return a group that was aborted and is not dropped yet; None if there is no such."""
        resources = self._resources
        return resources if resources is not None and resources.aborted else None

    def received_bytes(self) -> int:
        """Return what has come from the other members, as far as that can be known."""
        resources = self._resources
        return resources.received_bytes() if resources is not None else 0

    # ------------------------------------------------------------------------------------ inside

    def _abort(self, resources: GroupResources) -> None:
        with self._abort_lock, _hurry():
            if resources.abort():
                log.info("group_aborted generation=%d", resources.spec.generation)

    def _connect(self, resources: GroupResources, spec: GroupSpec) -> None:
        """Connect to the leader's store; the leader does so too, like everyone else."""
        where = StoreAddress(spec.leader_address, spec.generation, spec.key)

        def connect() -> GroupStore:
            store = GroupStore.connect(where, resources.left_s, lambda: resources.aborted)
            if resources.aborted:
                store.close()
            return store

        resources.store = self.wait_aside(resources, connect, resources.left_s())
        if resources.aborted:
            resources.store.cut()
        resources.store.set_timeout(timedelta(seconds=spec.timeout_s))

    def _init(self, resources: GroupResources, spec: GroupSpec) -> None:
        if "nccl" in spec.backend:
            os.environ.update(c10d.NCCL_ENVIRONMENT)
        with c10d.same_excepthook():
            self._seams.init_process_group(
                backend=spec.backend,
                store=PrefixStore(_prefix(spec), resources.store),
                rank=spec.rank,
                world_size=spec.world_size,
                timeout=timedelta(seconds=spec.timeout_s),
            )
        if "gloo" in spec.backend and resources.loop is None:
            raise GroupError(
                f"torch {torch.__version__} has built its gloo backend in another way than those "
                f"before it, so that a broken group could not be aborted; install {TORCH_RANGE}"
            )
        resources.is_formed = True

    def _make_gloo(self, real: Any, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        """Build a gloo backend on this generation's device; called by torch, for every group."""
        resources = self._resources
        if resources is None:  # a group of the user's own, outside of ours
            return real(store, rank, size, timeout=timedelta(seconds=timeout_s))
        if resources.device is None:
            known = socket_inodes()
            resources.device = _device_within(real, resources.spec)
            resources.loop = find_event_loop(known)
            if resources.loop is None:
                raise GroupError(
                    "cannot identify gloo's sockets (/proc/self/fdinfo does not list what "
                    "an epoll set watches), so a broken group could not be aborted; run on Linux, "
                    "with GLOO_DEVICE_TRANSPORT unset or TCP"
                )
        # A subgroup is the script's, and so is how long others may take until they make it, too.
        limit_s = timeout_s if resources.is_formed else min(timeout_s, resources.left_s())
        options = c10d.private_names().gloo_options()
        options._devices = [resources.device]
        options._timeout = timedelta(seconds=limit_s)
        options._threads = c10d.GLOO_THREADS
        before = frozenset(resources.loop.watched()) if resources.loop else frozenset()

        def build() -> Any:
            backend = real(store, rank, size, options)
            if size > 1:
                _check_ends(resources, store, rank, size, before)
            return backend

        # Only members of a group that forms have a reason to connect.
        open_listener(resources.loop)
        try:
            backend = self.wait_aside(resources, build, limit_s)
        except GroupError as error:
            if not resources.is_formed:
                raise  # `form` adds whose it is
            raise GroupError(f"{resources.spec}: a subgroup was not formed: {error}") from error
        finally:
            shut_listener(resources.loop)
        backend._set_default_timeout(timedelta(seconds=timeout_s))
        resources.add_backend(backend, before)
        return backend

    def wait_aside(
        self, resources: GroupResources, call: Callable[[], Made], limit_s: float
    ) -> Made:
        """Run a call of torch's that may block where nothing reaches it, and wait for it.

        A constructor of gloo waits for peers that may have stopped, TCPStore's for a server that
        may have (without any timeout, in torch 2.13). On abort or timeout the thread is left
        behind; its sockets are cut, it ends by itself, and what it still makes is released.
        """
        future: Future[Made] = Future()
        resources.begin_wait(future)
        try:
            threading.Thread(
                target=_fulfil,
                args=(future, call, self._reaper.release_later),
                name="elastic-form",
                daemon=True,
            ).start()
            return future.result(timeout=limit_s)
        except FutureTimeout:
            if future.done():  # the call's own
                raise
            raise GroupError(f"timed out after {limit_s:.1f} s") from None
        finally:
            resources.end_wait()
            future.cancel()

    def _standing(self) -> c10d.DefaultGroup | None:
        spec = self.spec
        return c10d.DefaultGroup(spec.rank, spec.world_size, spec.backend) if spec else None

    def _forget_subgroup(self, group: Any) -> bool:
        resources = self._resources
        return resources is None or resources.forget_subgroup(group)


@contextlib.contextmanager
def _hurry() -> Iterator[None]:
    """Let this thread have the interpreter soon, also from a main thread that computes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(HURRY_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _device_within(real: Any, spec: GroupSpec) -> Any:
    """Return a gloo device that listens on a port of this worker's range, or raise GroupError."""
    if not spec.ports:
        return real.create_device(hostname=spec.host)
    for attempt in range(LISTEN_ATTEMPTS):
        try:
            with binding_within(spec.ports):
                return real.create_device(hostname=spec.host)
        except OSError as error:
            raise GroupError(f"gloo cannot listen on {spec.host}: {error}") from error
        except RuntimeError:
            # Another process may have begun to listen on the same port at the same moment.
            if attempt == LISTEN_ATTEMPTS - 1:
                raise
    raise InvariantViolation("no attempt to listen")


def _check_ends(
    resources: GroupResources,
    store: Any,
    rank: int,
    size: int,
    before: frozenset[WatchedDescriptor],
) -> None:
    """See that both ends of each of gloo's new connections are a member's.

    gloo takes the first to connect for the member that it waits for. Each connection of two
    members goes into the prints of both, so that all of them come to nothing together.
    GroupError if another process is connected to one of us.
    """
    now = resources.loop.watched() if resources.loop else ()
    mine = ends_print((one for one in now if one not in before), resources.spec.key.encode())
    store.set(f"ends/{rank}", mine.hex())
    total = 0
    for one in store.multi_get([f"ends/{other}" for other in range(size)]):
        total ^= int(bytes(one), 16)
    if total:
        raise GroupError(
            "a process that is no member has connected to a member while the group formed, or "
            "addresses are translated between the nodes, which must not be"
        )


def _fulfil(
    future: Future[Made],
    call: Callable[[], Made],
    release_later: Callable[[list[Any]], None] | None = None,
) -> None:
    try:
        made = call()
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):  # the wait was given up
            future.set_exception(error)
        return
    try:
        future.set_result(made)
    except InvalidStateError:
        if release_later is not None:
            release_later([made])
