"""Routes the output of workers by torchrun's flags: to the screen, with a prefix, into files.

Rule: a worker's stdout and stderr are one stream here, in the order of arrival; a flag for one of
the two applies to both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from elastic.core.facts import NodeId, WorkerId
from elastic.core.view import JobView
from elastic.errors import ConfigError, StorageError
from elastic.wire.codec_jobs import LogChunk

FILE = "output.log"
PREFIX = "[${role_name}${local_rank}]:"
ALL = -1
LEVELS = ("0", "1", "2", "3")


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """How the output of workers is handled, by local rank.

    Attributes:
        directory: for files, "" for none.
        redirects, tee: local ranks (`ALL` for each) whose output is written to files; redirected
            output is not shown, teed output is shown with a prefix.
        local_ranks: the ones to show, () for all.
        role: for prefixes.
        prefix: template of a prefix, with role_name, rank, local_rank and hostname, the node.
    """

    directory: str = ""
    redirects: frozenset[int] = frozenset()
    tee: frozenset[int] = frozenset()
    local_ranks: tuple[int, ...] = ()
    role: str = "default"
    prefix: str = PREFIX


def parse_streams(flag: str, text: str) -> frozenset[int]:
    """Parse "3" or "0:1,1:2": the local ranks that a flag of torchrun applies to.

    Raises:
        ConfigError: it has neither form.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        rank, colon, level = part.strip().rpartition(":")
        if level not in LEVELS or (colon and not rank.isdecimal()) or (not colon and "," in text):
            raise ConfigError(
                f"{flag} {text!r}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one "
                f"of them for each local rank, such as 0:3,1:1"
            )
        if level != "0":
            chosen.add(int(rank) if colon else ALL)
    return frozenset(chosen)


@dataclass
class OutputRouter:
    """Routes the output of one job's workers."""

    options: LogOptions
    _local: dict[WorkerId, int] = field(default_factory=dict)

    def know(self, view: JobView) -> None:
        """Take a snapshot, from which local ranks are derived."""
        if view.record.group is None:
            return
        count: dict[NodeId, int] = {}
        for member in view.record.group.members:
            self._local[member.worker_id] = count.get(member.node_id, 0)
            count[member.node_id] = self._local[member.worker_id] + 1

    def route(self, chunk: LogChunk) -> bool:
        """Write output to its file, if it has one; return whether to show it.

        Raises:
            StorageError: the file cannot be written.
        """
        rank, options = self._rank(chunk), self.options
        is_redirected = _speaks_of(options.redirects, rank)
        if options.directory and (is_redirected or _speaks_of(options.tee, rank)):
            self._write(chunk)
        is_hidden = is_redirected and not _speaks_of(options.tee, rank)
        return not is_hidden and (not options.local_ranks or rank in options.local_ranks)

    def prefix(self, chunk: LogChunk) -> str:
        """Return the prefix for each line of this output, "" unless it is teed."""
        rank = self._rank(chunk)
        if not _speaks_of(self.options.tee, rank):
            return ""
        fields: Mapping[str, object] = {
            "role_name": self.options.role,
            "local_rank": rank,
            "rank": max(chunk.rank, 0),
            "hostname": chunk.node_id,
        }
        return Template(self.options.prefix).safe_substitute(fields)

    def _rank(self, chunk: LogChunk) -> int:
        """Return the local rank; before the first group, the rank is used instead."""
        return self._local.get(chunk.worker_id, max(chunk.rank, 0))

    def _write(self, chunk: LogChunk) -> None:
        attempt = max(chunk.generation - 1, 0)
        place = str(chunk.rank) if chunk.rank >= 0 else chunk.worker_id.replace("/", "-")
        path = Path(self.options.directory) / f"attempt_{attempt}" / place / FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(chunk.text)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be written ({error.strerror or error}): give --log-dir a directory "
                f"with room that you may write to"
            ) from error


def _speaks_of(chosen: frozenset[int], rank: int) -> bool:
    return ALL in chosen or rank in chosen
