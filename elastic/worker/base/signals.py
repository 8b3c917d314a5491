"""Signals of a worker process: which are the agent's to answer, and which its script has taken.

Rule: what a script has installed a handler for is the script's. Until then a signal for the whole
node is left to the agent, which has it too.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


def leave_to_agent(number: int, _frame: FrameType | None) -> None:
    """Take a signal that was meant for the whole node: the agent has it too, and decides."""
    # Not through a stream or a logger: the main thread may be inside of one right now.
    os.write(2, f"{signal.Signals(number).name} is left to the agent\n".encode())


def is_handled(number: signal.Signals) -> bool:
    """Return whether the script has a handler of its own for a signal; any thread."""
    handler = signal.getsignal(number)
    plain = (leave_to_agent, signal.SIG_DFL, signal.SIG_IGN, None)
    return handler not in plain


def send_to_main(number: signal.Signals) -> None:
    """Have the main thread run its handler, also where it sleeps or waits; any thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)
