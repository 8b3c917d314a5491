"""Detects from the text of an error that a collective failed because its group broke.

Rule: the texts are those of gloo and NCCL; our own code raises `GroupBroken`. A traceback that ends
with one of them means that another process failed.
"""

from __future__ import annotations

BROKEN_WORDS = (
    "gloo/transport",
    "[gloo]",
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
    "elastic.errors.GroupBroken",
)
"""Exceptions whose type means the same, with their names in tracebacks."""


def broken_words_in(text: str) -> bool:
    """Return whether a text has one of these words, or is a traceback that ends with a type."""
    last = text.rstrip().rpartition("\n")[2]
    return last.startswith(BROKEN_TYPES) or any(word in text for word in BROKEN_WORDS)


def reports_of_broken(line: str) -> bool:
    """Return whether the last line of a traceback means that a collective broke."""
    if line.startswith("RuntimeError: "):
        return broken_words_in(line)
    return line.startswith(BROKEN_TYPES)
