"""How many files and connections this process may have open, and its children with it."""

from __future__ import annotations

import resource


def raise_limit(wanted: int) -> int:
    """Let this process open so many, as far as the hard limit goes.

    Returns:
        How many it may open now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited:
        wanted = min(wanted, hard)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return wanted if soft == unlimited else soft
