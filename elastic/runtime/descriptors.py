"""The limit of open files and sockets of this process, which its children inherit."""

from __future__ import annotations

import resource


def raise_limit(wanted: int) -> int:
    """Raise the soft limit to `wanted`, as far as the hard limit allows.

    Returns:
        How many of `wanted` it may open now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited:
        wanted = min(wanted, hard)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return wanted if soft == unlimited else soft
