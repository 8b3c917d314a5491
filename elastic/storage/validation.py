"""What is to be found out about a reported checkpoint, and what was, beside its files.

    CHECKPOINT/_COMMITTED    names what is wished, so that nobody who goes on with the run forgets
    CHECKPOINT/_VALIDATED    what came of it; written once

Rule: the first word about a checkpoint stands. A file that is not what was written says nothing,
and the checkpoint is validated again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.core.world import CheckpointStatus
from elastic.errors import StorageError
from elastic.storage.files import Files
from elastic.storage.marker import VALIDATED, CheckpointMarker
from elastic.storage.summed import from_summed_json, to_summed_json

FORMAT = 1


@dataclass(frozen=True)
class ValidationRequest:
    """How one checkpoint is to be validated, as far as its report said so.

    Attributes:
        fn_kwargs: for the validation function, beside those of the run; what JSON can say.
        timeout_s: instead of the run's; None for that one.
    """

    fn_kwargs: dict[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None

    def to_json(self) -> str:
        """Return the text that stands in the marker."""
        return json.dumps({"fn_kwargs": self.fn_kwargs, "timeout_s": self.timeout_s})

    @classmethod
    def from_json(cls, text: str) -> ValidationRequest:
        """Read the text in the marker; what a later version added is passed over."""
        body = json.loads(text)
        return cls(dict(body.get("fn_kwargs") or {}), body.get("timeout_s"))


@dataclass(frozen=True)
class ValidationFinding:
    """What became of one validation.

    Attributes:
        status: one of `VALIDATION_OVER`.
        metrics: what the validation function returned; JSON object.
        reason: why it came to nothing, "" if it did not.
    """

    status: CheckpointStatus
    metrics: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def to_json(self) -> str:
        """Return the text of the file."""
        body = {
            "status": self.status.value,
            "metrics": self.metrics,
            "reason": self.reason,
        }
        return to_summed_json(body, FORMAT)

    @classmethod
    def from_json(cls, text: str) -> ValidationFinding:
        """Read the text of the file.

        Raises:
            ValueError: it is torn, changed, or of another format.
        """
        body = from_summed_json(text, FORMAT)
        return cls(CheckpointStatus(body["status"]), dict(body["metrics"]), body["reason"])


def completed(checkpoint: Files, marker: CheckpointMarker) -> CheckpointMarker:
    """Return a marker with what is known of the validation that it wishes.

    Raises:
        StorageError: storage cannot be read.
    """
    if not marker.validation:
        return marker
    found = read_finding(checkpoint)
    if found is None:
        return replace(marker, status=CheckpointStatus.PENDING_VALIDATION)
    metrics = {**json.loads(marker.metrics), **found.metrics}
    return replace(marker, status=found.status, metrics=json.dumps(metrics))


def read_finding(checkpoint: Files) -> ValidationFinding | None:
    """Return what a validation came to, None if that is not known.

    Raises:
        StorageError: storage cannot be read.
    """
    try:
        return ValidationFinding.from_json(checkpoint.read(VALIDATED).decode())
    except ValueError:
        return None
    except StorageError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return None
        raise


def write_finding(checkpoint: Files, finding: ValidationFinding) -> ValidationFinding:
    """Write what a validation came to, unless somebody has done so; returns what stands.

    Raises:
        StorageError: it cannot be written.
    """
    if checkpoint.create(VALIDATED, finding.to_json().encode()):
        return finding
    known = read_finding(checkpoint)
    if known is not None:
        return known
    checkpoint.write(VALIDATED, finding.to_json().encode())
    return finding
