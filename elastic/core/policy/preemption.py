"""Announced losses of nodes: how they are charged to a job, and when a checkpoint is taken before.

Rule: a node that announces its leave is no failure, however it then ends: its losses are charged to
`max_preemptions` alone.
"""

from __future__ import annotations

from elastic.core.config import JobSpec, ns
from elastic.core.policy.decision import Decision

SAVE_RESERVE_S = 3.0
"""A checkpoint begun later than this before the end would not be complete in time."""


def judge_budget(spec: JobSpec, preemptions: int) -> Decision[bool]:
    """Decide whether a job ends because too many nodes were taken from it."""
    limit = spec.max_preemptions
    if limit == -1 or preemptions <= limit:
        return Decision(False, f"{preemptions} preempted nodes")
    return Decision(
        True,
        f"{preemptions} nodes of its groups were preempted, max_preemptions={limit}: raise it "
        f"(-1: for ever), or run on nodes that stay",
    )


def save_before(
    leave_by_ns: int, *, last_ns: int | None, now_ns: int, can_go_on: bool
) -> Decision[bool]:
    """Decide whether a checkpoint is taken now because nodes are about to leave.

    While such a group can stay, the state is passed on in memory, and need not be saved.
    Otherwise at once, because the machine may be gone earlier than announced, and again whenever
    half of the remaining time is over: training continues until the end, and its work after the
    last checkpoint is repeated if no survivor has it.

    Args:
        leave_by_ns: when the first of the nodes is gone.
        last_ns: when a checkpoint was last asked for because of them, None for never.
        now_ns: on the same clock.
        can_go_on: a group can be formed now without these nodes, with a member that has the state.
    """
    if can_go_on:
        return Decision(False, "the group can do without the nodes that leave")
    if last_ns is None:
        left_s = max(0, leave_by_ns - now_ns) / 1e9
        return Decision(
            True, f"no group with the state can stay when nodes leave in {left_s:.0f} s"
        )
    due_ns = last_ns + max(0, leave_by_ns - last_ns) // 2
    if leave_by_ns - due_ns < ns(SAVE_RESERVE_S):
        return Decision(False, "no time for another checkpoint before the nodes leave")
    if now_ns >= due_ns:
        left_s = max(0, leave_by_ns - now_ns) / 1e9
        return Decision(True, f"once more before nodes leave in {left_s:.0f} s")
    return Decision(False, "saved; once more when half of the time is over", due_ns)
