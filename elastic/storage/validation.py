"""Validation of a reported checkpoint: the request and the result, stored with its files.

    CHECKPOINT/_COMMITTED    holds the request, so that a later attempt of the run still finds it
    CHECKPOINT/_VALIDATED    holds the result; written once

Rule: the first result of a checkpoint is final. A damaged result file is ignored, and the
checkpoint is validated again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.core.facts import CheckpointStatus
from elastic.storage.files import Files
from elastic.storage.marker import VALIDATED, CheckpointMarker
from elastic.storage.summed import from_summed_json, to_summed_json

FORMAT = 1


@dataclass(frozen=True)
class ValidationRequest:
    """Settings of one checkpoint's validation, from its report.

    Attributes:
        fn_kwargs: for the validation function, beside those of the run; JSON values.
        timeout_s: overrides the run's timeout; None for that one.
    """

    fn_kwargs: dict[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None

    def to_json(self) -> str:
        return json.dumps({"fn_kwargs": self.fn_kwargs, "timeout_s": self.timeout_s})

    @classmethod
    def from_json(cls, text: str) -> ValidationRequest:
        """Parse the text in the marker; fields of a later version are ignored."""
        body = json.loads(text)
        return cls(dict(body.get("fn_kwargs") or {}), body.get("timeout_s"))


@dataclass(frozen=True)
class ValidationFinding:
    """Result of one validation.

    Attributes:
        status: a final one.
        metrics: return value of the validation function; JSON object.
        reason: why it failed, "" if it succeeded.
    """

    status: CheckpointStatus
    metrics: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def to_json(self) -> str:
        body = {
            "status": self.status.value,
            "metrics": self.metrics,
            "reason": self.reason,
        }
        return to_summed_json(body, FORMAT)

    @classmethod
    def from_json(cls, text: str) -> ValidationFinding:
        """Parse the text of the file.

        Raises:
            ValueError: it is torn, changed, or of another format.
        """
        body = from_summed_json(text, FORMAT)
        return cls(CheckpointStatus(body["status"]), dict(body["metrics"]), body["reason"])


def completed(checkpoint: Files, marker: CheckpointMarker) -> CheckpointMarker:
    """Return the marker with status and metrics of its validation, if it requests one."""
    if not marker.validation:
        return marker
    found = read_finding(checkpoint)
    if found is None:
        return replace(marker, status=CheckpointStatus.PENDING_VALIDATION)
    metrics = {**json.loads(marker.metrics), **found.metrics}
    return replace(marker, status=found.status, metrics=json.dumps(metrics))


def read_finding(checkpoint: Files) -> ValidationFinding | None:
    """Return the result of a validation, None if there is none."""
    try:
        return ValidationFinding.from_json((checkpoint.read_if_there(VALIDATED) or b"").decode())
    except ValueError:
        return None


def write_finding(checkpoint: Files, finding: ValidationFinding) -> ValidationFinding:
    """Write the result of a validation, unless there is one; returns the result that counts."""
    if checkpoint.create(VALIDATED, finding.to_json().encode()):
        return finding
    known = read_finding(checkpoint)
    if known is not None:
        return known
    checkpoint.write(VALIDATED, finding.to_json().encode())
    return finding
