"""How a collective says that its group broke: by text alone, whoever raised it.

Rule: the words of gloo and NCCL, and of our own sockets; a traceback that ends with them tells of
somebody else's death.
"""

from __future__ import annotations

BROKEN_WORDS = (
    "gloo/transport",
    "[gloo]",
    "mesh: ",
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "NCCL error",
    "NCCL communicator was aborted",
    "NCCL communicator encountered error",
    "ProcessGroup was aborted",
)
"""Text of a RuntimeError that torch raises in a collective when a peer is gone."""

BROKEN_TYPES = (
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistStoreError",
    "elastic.errors.GroupError",
)
"""Exceptions that say so by their type, as tracebacks name them."""


def broken_words_in(text: str) -> bool:
    """Return whether a text says that a collective broke."""
    return any(word in text for word in BROKEN_WORDS)


def reports_of_broken(line: str) -> bool:
    """Return whether the last line of a traceback says that a collective broke."""
    if line.startswith("RuntimeError: "):
        return broken_words_in(line)
    return line.startswith(BROKEN_TYPES)
