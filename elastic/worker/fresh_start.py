"""What a script finds when it begins, for every run of it in one process.

A script is run again in the processes that survive a loss. What it has set for its whole process
would be there already: its working directory, its default dtype, which differs from the one that a
replacement begins with. `KEPT` lists what is put back.

Rule: only what a process has one of, and what scripts are known to set. Variables that place a
worker stay as they are set for the new group. What the import of an installed package has set is
put back too, though it is not imported again: only folders of packages stay on `sys.path`, and the
loggers of packages as they are. What cannot be taken back is said: see `loose_ends`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import backends

from elastic.core.config import STACKS_SIGNAL
from elastic.errors import UsageError
from elastic.worker.ahead import PLACE
from elastic.worker.c10d import NCCL_ENVIRONMENT
from elastic.worker.loose_ends import INSTALLED

log = logging.getLogger(__name__)

OURS = PLACE.union(NCCL_ENVIRONMENT)
"""Environment variables that are set with each group."""
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
STOPPED = (0.0, 0.0)


@dataclass(frozen=True)
class Kept:
    """Something that a process has one of.

    Attributes:
        name: for people.
        read: returns how it is now.
        restore: makes it as `read` said; called only where it is not.
    """

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], Any]


class FreshStart:
    """How this process was before the first run of its script."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._found: dict[str, Any] | None = None

    def begin(self) -> bool:
        """Save what is, at the first call; put it back at each later one.

        Returns:
            Whether this run is not the first.

        Raises:
            UsageError: the working directory is gone.
        """
        if self._found is None:
            self._found = {}
            for kept in KEPT:
                with contextlib.suppress(Exception):  # What this system does not show stays.
                    self._found[kept.name] = kept.read()
            return False
        for kept in KEPT:
            if kept.name not in self._found:
                continue
            try:
                _put_back(kept, self._found[kept.name])
            except UsageError:
                raise
            except Exception as error:
                log.warning(
                    "not_put_back what=%r error=%r: the script is run again and finds it as its "
                    "last run has left it; elastic run --fresh-process begins new processes",
                    kept.name,
                    str(error),
                )
        return True


def _put_back(kept: Kept, found: Any) -> None:
    with contextlib.suppress(Exception):  # Some cannot be read as they are now.
        if kept.read() == found:
            return
    kept.restore(found)


# ---------------------------------------------------------------- of the process


def _directory() -> str:
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def _enter(directory: str) -> None:
    try:
        os.chdir(directory or "/")
    except OSError as error:
        raise UsageError(
            f"working directory {directory}, in which the script is to run again, cannot be "
            f"entered any more ({error.strerror}); leave it where it is for as long as the job runs"
        ) from error


def _umask() -> int:
    # To ask the system for it is to change it, for the files of all threads.
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Umask":
            return int(value, 8)
    raise OSError("/proc/self/status has no Umask")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OURS}


def _restore_environment(found: Mapping[str, str]) -> None:
    for name in _environment().keys() - found.keys():
        del os.environ[name]
    os.environ.update(found)


def _restore_path(found: list[str]) -> None:
    # Packages that stay imported find more of themselves there.
    added = [one for one in sys.path if one not in found]
    sys.path[:] = found + [one for one in added if set(INSTALLED).intersection(Path(one).parts)]


def _timers() -> bool:
    """Return whether one of them runs; how long it has still to run changes by itself."""
    return any(signal.getitimer(timer) != STOPPED for timer in TIMERS)


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _restore_handlers(found: Mapping[int, Any]) -> None:
    for number, handler in found.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    # A handler of the script's may have been put over it.
    if faulthandler.unregister(STACKS_SIGNAL):  # type: ignore[func-returns-value]
        faulthandler.register(STACKS_SIGNAL, all_threads=True)


def _restore_warnings(found: tuple[Any, list[Any]]) -> None:
    logging.captureWarnings(False)  # Which would not do it a second time.
    warnings.showwarning = found[0]
    warnings.resetwarnings()  # Which also outdates what modules remember of them.
    warnings.filters.extend(found[1])  # type: ignore[attr-defined]


def _restore_gc(found: tuple[bool, Any]) -> None:
    gc.set_threshold(*found[1])
    (gc.enable if found[0] else gc.disable)()


def _restore_stream(name: str, found: Any) -> None:
    """Put a standard stream back; one that was laid around its buffer must not close it."""
    now = getattr(sys, name)
    try:
        buffer = getattr(found, "buffer", None)
    except ValueError:
        return  # The script has taken it apart: what it has made of it is all there is.
    if now is not found and buffer is not None:
        with contextlib.suppress(OSError, ValueError):
            if getattr(now, "buffer", None) is buffer:
                now.detach()  # Flushes it, too.
    setattr(sys, name, found)


def _stream(name: str) -> Kept:
    return Kept(
        f"sys.{name}", lambda: getattr(sys, name), lambda found: _restore_stream(name, found)
    )


# ---------------------------------------------------------------- logging


@dataclass(frozen=True)
class _Logger:
    """How a logger is set up."""

    handlers: tuple[logging.Handler, ...] = ()
    filters: tuple[Any, ...] = ()
    level: int = logging.NOTSET
    propagate: bool = True
    disabled: bool = False


def _loggers() -> tuple[int, dict[str, _Logger]]:
    """Return what is disabled in all loggers, and how each one is set up."""
    all_of_them = logging.root.manager
    named = [one for one in all_of_them.loggerDict.values() if isinstance(one, logging.Logger)]
    return all_of_them.disable, {
        one.name: _Logger(
            tuple(one.handlers), tuple(one.filters), one.level, one.propagate, one.disabled
        )
        for one in [logging.root, *named]
    }


def _restore_loggers(found: tuple[int, dict[str, _Logger]]) -> None:
    logging.disable(found[0])
    for name, now in _loggers()[1].items():
        top = name.partition(".")[0]
        is_packages = top in sys.modules and top != "__main__"
        then = found[1].get(name, now if is_packages else _Logger())
        if then == now:
            continue
        one = logging.root if name == logging.root.name else logging.getLogger(name)
        one.setLevel(then.level)
        one.handlers[:], one.filters[:] = then.handlers, then.filters
        one.propagate, one.disabled = then.propagate, then.disabled
        for handler in set(now.handlers).difference(then.handlers):
            with contextlib.suppress(OSError, ValueError):
                handler.close()


# ---------------------------------------------------------------- torch


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _float32_precision() -> tuple[str, tuple[str, ...]]:
    # What was set by both of its interfaces cannot be read any more.
    new = tuple(str(one.fp32_precision) for one in _PRECISIONS)
    return torch.get_float32_matmul_precision(), new


def _restore_precision(found: tuple[str, tuple[str, ...]]) -> None:
    torch.set_float32_matmul_precision(found[0])
    for owner, value in zip(_PRECISIONS, found[1], strict=True):
        owner.fp32_precision = value


_PRECISIONS: tuple[Any, ...] = tuple(
    one
    for one in (
        backends,
        backends.cuda.matmul,
        getattr(backends.cudnn, "conv", None),
        getattr(backends.cudnn, "rnn", None),
        getattr(backends.mkldnn, "matmul", None),
        getattr(backends.mkldnn, "conv", None),
        getattr(backends.mkldnn, "rnn", None),
    )
    if hasattr(one, "fp32_precision")
)


# ---------------------------------------------------------------- the table


def _flag(owner: Any, name: str) -> Kept:
    """An attribute that says it all."""
    where = getattr(owner, "__name__", type(owner).__name__)
    return Kept(
        f"{where}.{name}",
        lambda: getattr(owner, name, None),
        lambda found: setattr(owner, name, found),
    )


KEPT: tuple[Kept, ...] = (
    Kept("working directory", _directory, _enter),
    Kept("umask", _umask, os.umask),
    Kept("environment", _environment, _restore_environment),
    Kept("sys.path", lambda: list(sys.path), _restore_path),
    *(_stream(name) for name in ("stdin", "stdout", "stderr")),
    *(_flag(sys, name) for name in ("excepthook", "displayhook")),
    _flag(threading, "excepthook"),
    Kept("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    # Timers first: without the script's handler one that goes off kills the process.
    Kept("timers", _timers, lambda _: [signal.setitimer(timer, 0) for timer in TIMERS]),
    Kept("signal handlers", _handlers, _restore_handlers),
    Kept("loggers", _loggers, _restore_loggers),
    Kept("warnings", lambda: (warnings.showwarning, [*warnings.filters]), _restore_warnings),
    Kept("garbage collector", lambda: (gc.isenabled(), gc.get_threshold()), _restore_gc),
    Kept("socket timeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
    Kept(
        "start method of processes",
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda found: multiprocessing.set_start_method(found, force=True),
    ),
    Kept(
        "sharing of tensors",
        torch.multiprocessing.get_sharing_strategy,
        torch.multiprocessing.set_sharing_strategy,
    ),
    Kept("numpy errors", np.geterr, lambda found: np.seterr(**found)),
    Kept("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    # None is not its default, but that it has none.
    Kept("default device", torch.get_default_device, lambda _: torch.set_default_device(None)),
    Kept("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    Kept("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Kept(
        "deterministic algorithms",
        _deterministic,
        lambda found: torch.use_deterministic_algorithms(found[0], warn_only=found[1]),
    ),
    _flag(torch.utils.deterministic, "fill_uninitialized_memory"),
    Kept("threads of torch", torch.get_num_threads, torch.set_num_threads),
    Kept("float32 precision", _float32_precision, _restore_precision),
    *(
        _flag(backends.cudnn, name)
        for name in ("enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32")
    ),
    *(
        _flag(backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction")
        for kind in ("fp16", "bf16")
    ),
    *(
        Kept(
            f"{kind} attention",
            getattr(backends.cuda, f"{kind}_sdp_enabled"),
            getattr(backends.cuda, f"enable_{kind}_sdp"),
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ),
)
"""All that is put back, in this order."""
