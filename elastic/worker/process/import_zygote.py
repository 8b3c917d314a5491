"""A fork of the zygote that has made the imports of a job, and forks workers for it.

A worker that takes the place of another would import for seconds what the one before had, while all
others wait for it.

Rule: what is imported here must not know that it is not in a worker yet. A package that asks for a
worker's place (its rank, its devices) while it is imported is imported by each worker for itself;
where something has started a thread or a child, or touched an accelerator, nothing is.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch

from elastic.worker.process.early_run import asks_to_print
from elastic.worker.process.environment import PLACE
from elastic.worker.process.importing import import_ahead, import_all, put_first

OURS = ("ELASTIC_", "TORCHELASTIC_")
DEVICES = "CUDA_VISIBLE_DEVICES"
BETWEEN = frozenset({"os", "collections", "importlib", "elastic", "__main__"})
"""Packages between the importing code and us in the stack; they are not the importer."""

_asking: set[str] = set()


@dataclass(frozen=True)
class ImportPlan:
    """What to import for the workers of a job, and where.

    Attributes:
        path: of its script, "" for a function.
        folders: its working directory, or "", and where it finds modules of its own.
        env: variables that it sets.
        modules: to import; empty for what the script imports first.
    """

    path: str
    folders: tuple[str, ...]
    env: Mapping[str, str]
    modules: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> ImportPlan:
        """Parse the agent's message."""
        fields = json.loads(text)
        folders, modules = tuple(fields["folders"]), tuple(fields["modules"])
        return cls(fields["path"], folders, fields["env"], modules)


class _WatchedEnviron(os._Environ):  # type: ignore[type-arg]
    """`os.environ` of a process that has no place yet."""

    def __getitem__(self, key: str) -> str:
        if not asks_to_print():
            _note(key)
        return str(super().__getitem__(key))

    def __contains__(self, key: object) -> bool:
        if not asks_to_print():
            _note(key)
        return super().__contains__(key)


def _note(key: object) -> None:
    """Remember the packages that are being imported where a variable is asked for."""
    if not (key in PLACE or key == DEVICES or str(key).startswith(OURS)):
        return
    frame: Any = sys._getframe(2)
    while frame is not None:
        _asking.add(str(frame.f_globals.get("__name__", "")).partition(".")[0])
        frame = frame.f_back
    _asking.difference_update(BETWEEN)


@contextmanager
def _watching() -> Iterator[None]:
    plain = os.environ.__class__
    os.environ.__class__ = _WatchedEnviron
    try:
        yield
    finally:
        os.environ.__class__ = plain


def run(plan: ImportPlan, zygote: socket.socket) -> None:
    """Make a job's imports in this process, which ends if they are of no use to its workers.

    Then the zygote is sent what is left to import, as JSON, [] for nothing.
    """
    os.environ.update(plan.env)
    working_dir, *folders = plan.folders
    with contextlib.suppress(OSError):
        os.chdir(working_dir or ".")
    for folder in reversed(folders):
        put_first(folder)
    sys.argv = [plan.path]
    known = frozenset(sys.modules)
    with _watching():
        if plan.modules:
            import_all(plan.modules)
        else:
            import_ahead(plan.path)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # Or each fork of this process would do so.
    has_begun = threading.active_count() > 1 or torch.cuda.is_initialized() or _has_children()
    if has_begun or _asking:
        left = [] if has_begun else _without(_asking, known)
        with contextlib.suppress(OSError):
            # Longer than any message about a forked worker.
            zygote.send(json.dumps(left).encode().ljust(64))
        os._exit(0)
    gc.collect()
    gc.freeze()


def _without(asking: set[str], known: frozenset[str]) -> Sequence[str]:
    """Return what was imported, in this order, and needs no package that has asked."""
    new = {name: module for name, module in sys.modules.items() if name not in known}
    out = {name for name in new if name.partition(".")[0] in asking}
    uses = {
        name: {name.rpartition(".")[0], *map(_home, [*getattr(module, "__dict__", {}).values()])}
        for name, module in new.items()
        if name not in out
    }
    while more := [name for name, used in uses.items() if not out.isdisjoint(used)]:
        out.update(more)
        for name in more:
            del uses[name]
    return [name for name in uses if name.partition(".")[0] not in sys.stdlib_module_names]


def _home(one: Any) -> str:
    """Return the module that an object is, or is defined in, or whose class it has."""
    if isinstance(one, ModuleType):
        return one.__name__
    return str((one if isinstance(one, type | FunctionType) else type(one)).__module__)


def _has_children() -> bool:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return bool(file.read().split())
    except OSError:  # A kernel without that list.
        return False
