"""The marker of a checkpoint: written last; the files are checked against it.

Rule: a directory without a readable marker is no checkpoint, unless the coordinator has recorded
it: then the prepared text is its marker (see `elastic.worker.checkpoint.committer`). The marker
lists every file with size and checksum, and has a checksum of itself, so that a flipped bit in any
file is detected.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from elastic.core.facts import CheckpointRecord, CheckpointStatus, ReportKind
from elastic.errors import StorageError
from elastic.storage.names import check_inside
from elastic.storage.summed import from_summed_json, to_summed_json

MARKER = "_COMMITTED"
PREPARED = "_PREPARED"
"""The text of a marker that is not written yet."""
VALIDATED = "_VALIDATED"
DAMAGED = "_DAMAGED"
"""Replaces the marker of a checkpoint that was found damaged; holds the reason."""
OURS = (MARKER, PREPARED, VALIDATED, DAMAGED)
"""Files that make a directory a committed checkpoint; a copy of one is not committed itself."""
METADATA = ".metadata.json"
"""Written by users beside a checkpoint's files, even after the commit: not checked."""
FORMAT = 3
UNKNOWN = -1
"""Value of an unknown checksum."""


class StoredFile(NamedTuple):
    """One file of a checkpoint.

    Attributes:
        path: relative to the checkpoint, with slashes.
        size: bytes.
        crc32: CRC-32 of its content, `UNKNOWN` if it was not computed.
    """

    path: str
    size: int
    crc32: int = UNKNOWN

    @classmethod
    def of(cls, path: str, content: bytes) -> StoredFile:
        return cls(path, len(content), zlib.crc32(content))

    def check(self, content: bytes) -> None:
        """Refuse content that differs from what was written.

        Raises:
            ValueError: naming the file, and how it differs.
        """
        self.compare(len(content), zlib.crc32(content))

    def compare(self, size: int, crc32: int) -> None:
        """Do the same, given size and checksum of the content."""
        if size != self.size:
            raise ValueError(f"{self.path} has {size} bytes instead of {self.size}")
        if self.crc32 not in (UNKNOWN, crc32):
            raise ValueError(f"{self.path} is damaged: CRC-32 {crc32:#x}, not {self.crc32:#x}")


@dataclass(frozen=True)
class CheckpointMarker:
    """Content of a marker.

    Attributes:
        job_id, generation, world_size: the group that wrote the checkpoint.
        kind, index: identify it in the generation; see `CheckpointRecord`.
        unix_ns: when it was committed.
        metrics: JSON object, reported with it.
        files: sorted by path.
        validation: how to validate it, JSON, "" for not at all; see `validation.ValidationRequest`.
        status: progress of the validation, which also adds metrics; not in the file, which never
            changes.
    """

    job_id: str
    generation: int
    index: int
    world_size: int
    unix_ns: int
    metrics: str
    files: tuple[StoredFile, ...]
    kind: ReportKind = ReportKind.SCRIPT
    validation: str = ""
    status: CheckpointStatus = CheckpointStatus.COMMITTED

    @property
    def automatic(self) -> bool:
        """Return whether the step engine took it, rather than the script."""
        return self.kind is ReportKind.AUTOMATIC

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def record(self, path: str) -> CheckpointRecord:
        return CheckpointRecord(
            path, self.generation, self.index, self.metrics, self.status, kind=self.kind
        )

    def about(self, name: str, default: Any = None) -> Any:
        return json.loads(self.metrics).get(name, default)

    def to_json(self) -> str:
        files = {file.path: [file.size, file.crc32] for file in self.files}
        fields = {**vars(self), "metrics": json.loads(self.metrics), "files": files}
        fields["kind"] = self.kind.value
        del fields["status"]
        return to_summed_json(fields, FORMAT)

    @classmethod
    def from_json(cls, text: str) -> CheckpointMarker:
        """Read the text of the file.

        Raises:
            ValueError: it is torn, changed, or of another format.
        """
        body = from_summed_json(text, FORMAT)
        try:
            files = tuple(
                StoredFile(check_inside(path), *size_and_sum[:2])
                for path, size_and_sum in body.pop("files").items()
            )
            # Fields of a later version are ignored, as in `run.json`.
            known = {key: body[key] for key in cls.__dataclass_fields__ if key in body}
            known |= {"metrics": json.dumps(body["metrics"]), "kind": ReportKind(body["kind"])}
            return cls(**known, files=files)
        except (KeyError, TypeError, AttributeError, ValueError, StorageError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
