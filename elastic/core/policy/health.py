"""Whether a node is fit for new workers: it has repeated faults, and the other nodes have not.

Rule: a node is never blamed for what happens everywhere. A crash that follows a job from node to
node is the job's fault; only faults of one node alone are the node's.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from elastic.core.config import CoordinatorConfig, ns
from elastic.core.facts import ExitCause, ExitKind
from elastic.core.policy.decision import Decision

FAULT_SIGNALS = (signal.SIGBUS, signal.SIGILL, signal.SIGSEGV)
"""Signals that broken memory and processors cause. SIGKILL is not among them: it comes from the
kernel's OOM killer, or from a person."""


def is_fault(cause: ExitCause, *, ordered: bool) -> bool:
    """Return whether an exit may be a node's fault.

    Args:
        cause: how the worker ended, or why it was made to.
        ordered: the coordinator ended it. A worker that an agent found stopped was stopped from
            outside; one that the coordinator found hanging has hung by itself.
    """
    if cause.kind is ExitKind.SIGNAL:
        return cause.code in [int(number) for number in FAULT_SIGNALS]
    return cause.kind is ExitKind.SPAWN_FAILED or (cause.kind is ExitKind.HUNG and ordered)


def judge_faults(
    here: Sequence[int],
    elsewhere: Sequence[int],
    now_ns: int,
    config: CoordinatorConfig,
) -> Decision[int]:
    """Decide until when a node takes no new workers because of the faults of its workers.

    Args:
        here: moments of the node's faults, oldest first.
        elsewhere: of every other live node, how many it had in the same window; empty if this is
            the only one, which is never quarantined: that would be useless.
        now_ns: on the clock of the moments.
        config: window, limit, and how long.

    Returns:
        The moment at which it ends, 0 for no quarantine.
    """
    since_ns = now_ns - ns(config.fault_window_s)
    recent = [moment for moment in here if moment > since_ns]
    count, limit = len(recent), config.node_faults_max
    if count <= limit or not elsewhere:
        return Decision(0, f"{count} faults of workers")
    if count <= 2 * max(elsewhere):
        return Decision(0, f"{count} faults of workers, and {max(elsewhere)} on another node")
    until_ns = recent[-1] + ns(config.quarantine_s)
    if until_ns <= now_ns:
        return Decision(0, f"{count} faults of workers, the last one long ago")
    reason = (
        f"{count} workers hung, crashed or did not start here within {config.fault_window_s:g} s, "
        f"at most {max(elsewhere)} on any other node"
    )
    return Decision(until_ns, reason, until_ns)
