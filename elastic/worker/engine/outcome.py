"""How a call of user code ended: an exception turned into the event that reports it.

Rule: pure apart from reading the exception. A broken collective is known by its type and by the
words that gloo and NCCL use, also when user code wrapped it in an exception of its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch.distributed as dist

from elastic.core.broken import broken_words_in
from elastic.core.facts import Failure
from elastic.errors import DamagedCheckpoint, GroupError, ProgramFailed
from elastic.worker.base.numbers import plain_number
from elastic.worker.group.collective_watch import INSTALLED

log = logging.getLogger(__name__)

MESSAGE_CHARS_MAX = 4_000
TRACEBACK_CHARS_MAX = 32_000
CHAIN_MAX = 20
NO_RESULT = "null"

OUR_PACKAGES = (
    "elastic.worker",
    "elastic.train.trainer",
    "elastic.train.stopping",
    "elastic.train.remote",
)
OURS = ("runpy",)
"""Modules that stand between the runner and the user's first frame."""


def failure_of(error: BaseException, position: str = "") -> Failure:
    """Return an exception as text, without frames of ours; `position` is to recognize repeats."""
    if isinstance(error, ProgramFailed):
        return Failure(
            error_type=error.error_type,
            message=_sendable(error.message)[:MESSAGE_CHARS_MAX],
            traceback=_sendable(error.traceback)[-TRACEBACK_CHARS_MAX:],
            position=position,
        )
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    lines = traceback.format_exception(kind, error, _users_part(error.__traceback__))
    # The end of a traceback shows what happened.
    return Failure(
        error_type=name,
        message=_sendable(_text(error))[:MESSAGE_CHARS_MAX],
        traceback=_sendable("".join(lines))[-TRACEBACK_CHARS_MAX:],
        position=position,
    )


def where_raised(error: BaseException) -> str:
    """Return the innermost place of user code, as "leave (train.py:12)"; "" for none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(INSTALLED):
            return f"{frame.name} ({os.path.basename(frame.filename)}:{frame.lineno})"
    return ""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be had: {type(second).__name__})"


def _sendable(text: str) -> str:
    """Replace what UTF-8 cannot carry."""
    return text.encode("utf-8", "backslashreplace").decode()


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Skip the leading frames that are ours; all of them, if the user has none."""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        filename = trace.tb_frame.f_code.co_filename
        is_ours = module in OURS or module.startswith(OUR_PACKAGES) or filename == "<frozen runpy>"
        if not is_ours:
            return trace
        trace = trace.tb_next
    return None


def is_group_broken(error: BaseException) -> bool:
    """Return whether an exception, or one that it wraps, came out of a broken collective."""
    return any(_is_broken_collective(link) for link in _chain(error))


def is_of_damage(error: BaseException) -> bool:
    """Return whether an exception, or one that it wraps, is of a damaged checkpoint."""
    return any(isinstance(link, DamagedCheckpoint) for link in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and those that led to it, as Python would print them."""
    current: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if current is None:
            return
        yield current
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)


def _is_broken_collective(error: BaseException) -> bool:
    if isinstance(error, (GroupError, dist.DistBackendError, dist.DistNetworkError)):
        return True
    if isinstance(error, dist.DistStoreError):
        return True
    if isinstance(error, ProgramFailed):
        return broken_words_in(error.traceback)
    return isinstance(error, RuntimeError) and broken_words_in(str(error))


def exit_code_of(error: SystemExit) -> int:
    """Return the code that the interpreter would end with, and print what it would print."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        # The operating system keeps eight bits; 256 must not pass for success.
        return error.code & 0xFF or (1 if error.code else 0)
    print(error.code, file=sys.stderr)
    return 1


def result_json(value: Any) -> str:
    """Return what a train function returned as JSON.

    Numbers of NumPy's, and tensors and arrays of one element, become plain numbers. What JSON
    cannot represent becomes null, and is logged.
    """
    try:
        return json.dumps(value, default=_number)
    except (TypeError, ValueError, RecursionError) as error:
        log.warning(
            "result_lost type=%s reason=%r: what the train function returned is not kept; return "
            "numbers, texts, lists and dicts, and save the rest in a checkpoint",
            type(value).__name__, str(error),
        )  # fmt: skip
        return NO_RESULT


def _number(value: Any) -> Any:
    try:
        plain = plain_number(value)
    except Exception as error:  # A meta tensor, or a device that is not well: no failure.
        raise TypeError(f"a {type(value).__name__} cannot be read: {error}") from error
    if plain is value:
        raise TypeError(f"a {type(value).__name__} is no JSON")
    return plain


def forget_frames(error: BaseException) -> None:
    """Release the local variables that an exception keeps alive: models, GPU memory."""
    for link in list(_chain(error)):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
