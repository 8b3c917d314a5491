"""The first interrupt of a followed job: it is saved, and ends between two steps.

Rule: the second one ends it at once; the first one's message states that.
"""

from __future__ import annotations

import contextlib
import sys

from elastic.client.jobs import Client
from elastic.core.config import JobSpec
from elastic.errors import Refused


def stop_saved(
    client: Client, spec: JobSpec, reason: str, *, limit_s: float | None = None
) -> float | None:
    """Stop a job after a checkpoint, and print that; for `on_interrupt` of `job_follower.follow`.

    Args:
        client: of its cluster.
        spec: of the job.
        reason: shown with it.
        limit_s: how long it may take, None for as long as the user waits.

    Returns:
        `limit_s`.

    Raises:
        ElasticError: the coordinator does not answer.
    """
    with contextlib.suppress(Refused):  # It has ended meanwhile.
        client.stop(spec.job_id, reason)
        is_saved = bool(client.get(spec.job_id).record.stopping)
        how = "is saved, and ends between two steps" if is_saved else "ends"
        within = f" within {limit_s:g} s" if limit_s is not None else ""
        text = f"\njob {spec.name} {how}{within}; Ctrl-C again ends it at once"
        print(text, file=sys.stderr, flush=True)
    return limit_s
