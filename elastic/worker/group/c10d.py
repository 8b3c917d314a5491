"""The private parts of torch.distributed that forming groups in a running process needs.

Rule: each name is looked up once, by `private_names()`, and a torch that lacks one is refused with
what to install. All private names of torch are listed in `torch_names`.

Three patched names are enough. `ProcessGroupGloo`, as torch's own group builder sees it, is where
each group (the default one, `new_group`, a device mesh) makes its sockets. `init_process_group` and
`destroy_process_group` are what a script written for torchrun calls at its start and end; before
and after it finds no group, though one is formed.
`Work.wait` is where Python waits for other ranks (see `abortable_wait`).
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from elastic.errors import GroupError, UsageError
from elastic.worker.base.torch_names import TORCH_RANGE

log = logging.getLogger(__name__)

MAPS = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)
"""What torch's own destroy_process_group empties."""

GLOO_THREADS = 2
"""In which each gloo backend carries out collectives; torch's own number."""

PARTS_MAX, PART_RANKS_MAX = 64, 8192
"""Limits of what a waiting worker reports of its subgroups, twice a second."""

NCCL_ENVIRONMENT = {
    # 2: an error in a collective ends its communicator, never the process (1 and 3 do).
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # The monitor kills a process whose watchdog is slow, which an abort can make it.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # A blocking communicator cannot be aborted while it connects.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    # NVIDIA's own tools for faults ask for it: aborts are not safe with NVLink SHARP.
    "NCCL_NVLS_ENABLE": "0",
}
"""Read by torch and NCCL when they make an NCCL group."""

NCCL_MIN = (2, 26, 2)
NCCL_BROKEN = (2, 28, 3), (2, 28, 8)
"""First and last release whose communicators cannot be relied on to abort."""


@dataclass(frozen=True)
class PrivateNames:
    """The private names, as found in the torch that is installed."""

    world: Any
    gloo: Any
    gloo_options: Any
    work: Any
    update_default: Callable[[Any], None]
    unregister_all: Callable[[], None]


@functools.cache
def private_names() -> PrivateNames:
    """Look up the private names; GroupError if this torch lacks one of them."""
    gloo = look_up(distributed_c10d, "ProcessGroupGloo")
    world = look_up(distributed_c10d, "_world")
    for name in (*MAPS, "default_pg", "group_count"):
        look_up(world, name)
    look_up(gloo, "create_device")
    return PrivateNames(
        world=world,
        gloo=gloo,
        gloo_options=look_up(gloo, "_Options"),
        work=_work(),
        update_default=look_up(distributed_c10d, "_update_default_pg"),
        unregister_all=look_up(distributed_c10d, "_unregister_all_process_groups"),
    )


def _work() -> Any:
    work = look_up(distributed_c10d, "Work")
    for name in ("wait", "is_completed", "_get_op_type"):
        look_up(work, name)
    return work


def look_up(owner: Any, name: str) -> Any:
    """Return a private name of torch's; GroupError if this torch lacks it."""
    found = getattr(owner, name, None)
    if found is None and not hasattr(owner, name):
        where = getattr(owner, "__name__", type(owner).__name__)
        raise GroupError(
            f"torch {torch.__version__} has no {where}.{name}, which forming groups in a running "
            f"process needs; install {TORCH_RANGE}"
        )
    return found


def forget_all_groups() -> list[Any]:
    """Reset torch.distributed to the state of a fresh process; nothing is destroyed.

    `destroy_process_group` waits 10 ms for each connection. Survivors and newcomers must agree on
    `group_count`, which is part of every store key of later groups, so it starts at 0 again.
    Returns what torch referred to: releasing it is slow; do it in the background.
    """
    found = private_names()
    groups: list[Any] = list(found.world.pg_map)
    groups += list(found.world.pg_map.values())
    found.update_default(None)
    for name in MAPS:
        getattr(found.world, name).clear()
    comms = getattr(found.world, "comms", None)
    if comms:
        groups += list(comms)
        comms.clear()
    found.unregister_all()
    found.world.group_count = 0
    _outdate_meshes()
    return groups


_meshes: dict[int, weakref.ref[Any]] = {}
"""The device meshes of this process by identity, since an old one may equal a new one."""


def _note_mesh(mesh: Any) -> None:
    key = id(mesh)
    _meshes[key] = weakref.ref(mesh, lambda _: _meshes.pop(key, None))


def _outdate_meshes() -> None:
    """Make the meshes of dropped groups unequal to all later ones.

    torch caches layouts of tensors by mesh, and a layout names our rank and our groups. Two meshes
    of the same shape are equal for torch: after a change of groups a rank would communicate in a
    group that is gone, or as another rank.
    """
    had_any = bool(_meshes)
    while _meshes:
        mesh = _meshes.popitem()[1]()
        if mesh is not None:
            mesh._thread_id = (mesh._thread_id, id(mesh))  # Part of __eq__, not of the cached hash.
    # Without meshes nothing is cached, and the module below takes 0.1 s to import.
    if had_any and "torch.distributed.tensor" in sys.modules:
        debug = importlib.import_module("torch.distributed.tensor.debug")
        # Entries of the old meshes are never found again; clearing only saves memory.
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def all_groups() -> list[Any]:
    """Return torch's process groups, newest first; any thread."""
    return list(private_names().world.pg_map)[::-1]


def issued() -> tuple[int, ...]:
    """Return how many collectives each group of this process has begun; any thread.

    As torch counts them; -1 for a backend that does not count. The numbers also change when groups
    are made or dropped.
    """
    numbers = []
    for group in all_groups():
        try:
            numbers.append(int(group._get_sequence_number_for_group()))
        except (AttributeError, RuntimeError):
            numbers.append(-1)
    return tuple(numbers)


def begun_in_parts() -> tuple[tuple[str, tuple[int, ...], int], ...]:
    """Return name, ranks and number of collectives begun of each subgroup; any thread.

    Empty if there are too many to report, or a backend does not count: an incomplete list proves
    nothing. The group of all ranks is left out, because torch counts our own messages in it too.
    """
    world, groups = private_names().world, all_groups()
    size, found = len(all_ranks_of(groups[-1])) if groups else 0, []
    for group in groups:
        ranks = all_ranks_of(group)
        if 1 < len(ranks) < size:
            count = int(group._get_sequence_number_for_group())
            found.append((str(world.pg_names[group]), ranks, count))
    if len(found) > PARTS_MAX or sum(len(ranks) for _, ranks, _ in found) > PART_RANKS_MAX:
        return ()
    return tuple(sorted(found))


def all_by_gloo() -> bool:
    """Return whether all groups of this process carry everything by gloo; any thread."""
    backends = [str(backend) for backend, _ in list(private_names().world.pg_map.values())]
    return _backends_in(",".join(backends)) == {"gloo"}


def _backends_in(text: str) -> set[str]:
    """Return the names in "gloo", or in "cpu:gloo,cuda:nccl"."""
    return {part.rpartition(":")[2] for part in text.split(",")}


def all_ranks_of(group: Any) -> tuple[int, ...]:
    """Return the ranks in the default group of a group's members, ascending; any thread."""
    return tuple(sorted(private_names().world.pg_group_ranks.get(group, {})))


@contextmanager
def same_excepthook() -> Iterator[None]:
    """Restore sys.excepthook, which init_process_group wraps once more at each call."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


# ---------------------------------------------------------------------------------------- patches


class GlooBuilder:
    """Replaces ProcessGroupGloo in torch's group builder; `make` builds the backend.

    torch also asks `isinstance(backend, ProcessGroupGloo)`, and reads attributes of it; both are
    forwarded to the real class.
    """

    def __init__(self, real: Any, make: Callable[..., Any]) -> None:
        """Store the real class, and its replacement: make(real, store, rank, size, timeout_s)."""
        self._real = real
        self._make = make

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Build a gloo backend, with our device if torch's builder asks in its usual way.

        Torch 2.15 also says, by a False, that the group takes no other members later.
        """
        timeout = named.get("timeout")
        asked = {name for name, value in named.items() if value is not False}
        if len(args) == 3 and asked == {"timeout"} and timeout is not None:
            return self._make(self._real, *args, timeout.total_seconds())
        return self._real(*args, **named)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class WaitHook(Protocol):
    """Waits for works in place of torch; see `abortable_wait.AbortableWait`."""

    def wait(self, real: Callable[..., Any], work: Any, *args: Any, **named: Any) -> Any:
        """Wait for a work, as torch's `Work.wait` (`real`) does."""
        ...


@dataclass(frozen=True)
class DefaultGroup:
    """The default group that a script gets from `init_process_group`."""

    rank: int
    world_size: int
    backend: str


class TorchPatches:
    """Replaces functions of torch with ours, and restores them."""

    def __init__(
        self,
        make_gloo: Callable[..., Any],
        *,
        standing: Callable[[], DefaultGroup | None],
        forget_subgroup: Callable[[Any], bool],
        waits: WaitHook,
        begin_save: Callable[..., Any],
    ) -> None:
        """Change nothing yet.

        Args:
            make_gloo: builds a gloo backend, called as make_gloo(class, store, rank, size, s).
            standing: the group that is formed now, None if there is none.
            forget_subgroup: called with one that the script destroys; returns whether torch may.
            waits: waits for works.
            begin_save: begins a save in the background, called as begin_save(real, ...).
        """
        self._make_gloo = make_gloo
        self._standing = standing
        self._forget_subgroup = forget_subgroup
        self._waits = waits
        self._begin_save = begin_save
        self._undo: list[tuple[Any, str, Any]] = []
        self._is_unasked = False
        self.init_process_group = dist.init_process_group

    def install(self) -> None:
        found = private_names()
        self._put(distributed_c10d, "ProcessGroupGloo", GlooBuilder(found.gloo, self._make_gloo))
        for name, ours in (
            ("init_process_group", self._adopt),
            ("destroy_process_group", self._destroy),
        ):
            real = getattr(distributed_c10d, name)
            wrapped = functools.wraps(real)(functools.partial(ours, real))
            for module in holders_of(name):
                self._put(module, name, wrapped)
        real_wait = found.work.wait
        wait = functools.wraps(real_wait)(
            lambda work, *args, **named: self._waits.wait(real_wait, work, *args, **named)
        )
        self._put(found.work, "wait", wait)
        # Not at the top: a driver that imports this module needs none of it.
        saver = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
        real_save = saver.async_save
        save = functools.wraps(real_save)(functools.partial(self._begin_save, real_save))
        for owner in (saver, importlib.import_module("torch.distributed.checkpoint")):
            self._put(owner, "async_save", save)
        begin = DeviceMesh.__init__

        @functools.wraps(begin)
        def begin_known(mesh: Any, /, *args: Any, **named: Any) -> None:
            begin(mesh, *args, **named)
            _note_mesh(mesh)

        self._put(DeviceMesh, "__init__", begin_known)

    def remove(self) -> None:
        """Restore torch's own functions."""
        while self._undo:
            setattr(*self._undo.pop())

    def hide(self) -> None:
        """Let a script find no default group until it asks for one, as under torchrun."""
        self._is_unasked = True
        private_names().update_default(None)

    def show(self) -> None:
        """Let it find the group all the same, if it has not asked for one yet."""
        if self._is_unasked and private_names().world.pg_map:
            private_names().update_default(default_group())
        self._is_unasked = False

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _present(self) -> DefaultGroup | None:
        """Return the group that is formed; a worker that is ahead of its group joins it first."""
        _ = private_names().world.default_pg  # What reads it joins: see `early_run`.
        return self._standing()

    def _adopt(self, real: Callable[..., None], *args: Any, **named: Any) -> None:
        """Let a script that makes its own default group have the one that is formed."""
        group = self._present()
        if group is None:
            real(*args, **named)
            return
        self._is_unasked = False
        private_names().update_default(default_group())
        names = ("backend", "init_method", "timeout", "world_size", "rank")
        passed = dict(zip(names, args, strict=False)) | named
        for name, ours in (("world_size", group.world_size), ("rank", group.rank)):
            if passed.get(name, -1) not in (-1, ours):
                raise UsageError(
                    f"init_process_group({name}={passed[name]}): this worker is rank {group.rank} "
                    f"of {group.world_size}, and its group is formed already; leave {name} out, or "
                    f"read it from the environment (RANK, WORLD_SIZE)"
                )
        if passed.get("timeout") is not None:
            look_up(distributed_c10d, "_set_pg_timeout")(passed["timeout"])
        backend = str(passed.get("backend") or group.backend).lower()
        if not _backends_in(backend) <= _backends_in(group.backend) | {"undefined"}:
            log.warning(
                "backend_differs asked=%s formed=%s: the script gets the group that is formed; set "
                "the backend in TorchConfig to change it",
                backend,
                group.backend,
            )

    def _destroy(self, real: Callable[..., None], group: Any = None) -> None:
        """Let a script end its groups; the default one is the runtime's, and only hidden from it.

        What follows, as an evaluation by rank 0 alone, asks `is_initialized()` whom to wait for.
        """
        if self._present() is None:
            real(group)
            return
        if group is None or group is default_group():
            self._is_unasked = False
            private_names().update_default(None)
            return
        if self._forget_subgroup(group):
            real(group)


def holders_of(name: str) -> list[Any]:
    """Return the modules that have a function of torch.distributed's by its name there.

    Parts of torch import such functions from each other, and so do users' modules.
    """
    real = getattr(distributed_c10d, name)
    modules = list(sys.modules.values())
    return [one for one in modules if getattr(one, "__dict__", {}).get(name) is real]


# ------------------------------------------------------------------------------------------- NCCL


def check_nccl(version: tuple[int, ...]) -> None:
    """Refuse releases of NCCL with which a lost worker would take the others with it.

    Args:
        version: as `torch.cuda.nccl.version` returns it.

    Raises:
        UsageError: an abort of this release's communicators may hang or crash.
    """
    first, last = NCCL_BROKEN
    if version >= NCCL_MIN and not first <= version[:3] <= last:
        return
    found, least, *broken = (".".join(map(str, one)) for one in (version, NCCL_MIN, first, last))
    raise UsageError(
        f"NCCL {found}: its communicators cannot be aborted safely, so that the loss of one worker "
        f"could hang or crash the others; expected {least} or newer, and none of {broken[0]} to "
        f"{broken[1]}: install a torch built with another one (python -c 'import torch; "
        f"print(torch.cuda.nccl.version())'), or choose backend='gloo'"
    )


def check_own_nccl() -> None:
    """Refuse the NCCL that this torch was built with; a torch without one reports it by itself."""
    if dist.is_nccl_available():
        check_nccl(torch.cuda.nccl.version())


def start_nccl_aborts(groups: list[Any]) -> list[threading.Thread]:
    """Abort every NCCL communicator of these groups, each in a thread of its own; return those.

    Aborting one after the other can deadlock: an abort waits for kernels that wait for a peer that
    has not yet aborted its other communicator. Never followed by destroy: once one member aborts, a
    clean shutdown is impossible. Threads are joined before new communicators are made.
    """
    threads = []
    for group in groups:
        backend = _nccl_backend(group)
        if backend is not None:
            thread = threading.Thread(
                target=_abort_one, args=(backend,), name="elastic-nccl-abort", daemon=True
            )
            thread.start()
            threads.append(thread)
    return threads


def any_nccl_error(groups: list[Any]) -> bool:
    """Return whether a communicator of these groups has failed."""
    for group in groups:
        backend = _nccl_backend(group)
        ask = getattr(backend, "get_error", None)
        if ask is None:
            continue
        try:
            if getattr(ask(), "name", "SUCCESS") != "SUCCESS":
                return True
        except RuntimeError:
            return True  # the communicator cannot answer any more
    return False


def default_group() -> Any:
    """Return the default process group, also one that is hidden from the script."""
    # Made before all others.
    return next(iter(private_names().world.pg_map), None) or distributed_c10d._get_default_group()


def default_store() -> Any:
    """Return the store of the default group, also of a hidden one; None if there is no group."""
    _, store = next(iter(private_names().world.pg_map.values()), ("", None))
    return store


@contextmanager
def shown_group() -> Iterator[bool]:
    """Let torch's functions find the default group, also one hidden from the script.

    Yields whether there is one.
    """
    world = private_names().world
    is_hidden = world.default_pg is None and bool(world.pg_map)
    if is_hidden:
        private_names().update_default(default_group())
    try:
        yield bool(world.pg_map)
    finally:
        if is_hidden:
            private_names().update_default(None)


def has_nccl(group: Any) -> bool:
    """Return whether a group carries device tensors by NCCL."""
    return _nccl_backend(group) is not None


def _nccl_backend(group: Any) -> Any:
    try:
        backend = group._get_backend(torch.device("cuda"))
    except (AttributeError, RuntimeError):
        return None  # a group for the CPU only
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend if hasattr(backend, "abort") and "nccl" in _name_of(backend) else None


def _name_of(backend: Any) -> str:
    name = getattr(backend, "name", "")
    return str(name() if callable(name) else name).lower()


def _abort_one(backend: Any) -> None:
    try:
        backend.abort()
    except Exception as error:  # the communicator may never have been made
        log.info("nccl_abort_failed error=%r", str(error))
