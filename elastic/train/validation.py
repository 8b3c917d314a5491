"""Validation of reported checkpoints, under Ray Train's names: function, arguments, timeout.

Rule: a report's validation request is stored beside the checkpoint, so that a resumed run can
continue it; so it must be JSON-serializable. The function itself comes with the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic.errors import UsageError
from elastic.storage.validation import ValidationRequest
from elastic.train.checkpoint import Checkpoint
from elastic.train.config_checks import expect_names, refuse, take_default, take_int, take_seconds
from elastic.train.metrics import to_json
from elastic.worker.checkpoint.validating import ValidationPlan

ValidationFn = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class ValidationTaskConfig:
    """How one checkpoint is validated.

    Attributes:
        fn_kwargs: keywords for the validation function. Those of a report override those of the
            trainer, and must be JSON-serializable.
        timeout_s: after so many seconds it is cancelled; None for no limit.
    """

    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        keywords = expect_names(self, "fn_kwargs", 'keywords, such as {"split": "test"}')
        object.__setattr__(self, "fn_kwargs", keywords)
        take_seconds(self, "timeout_s", "None (never) or seconds > 0", none=True)


@dataclass(frozen=True)
class ValidationConfig:
    """What validates checkpoints that are reported with `validation=`.

    Attributes:
        fn: called with the checkpoint and keywords, returns a dict of metrics. It runs in a
            separate process beside training, on the node of rank 0 and with its accelerator, if
            it has one: both share its memory. It belongs to no group. What it prints is in the
            output of rank 0.
        task_config: default keywords and timeout, for reports that set none.
        ray_remote_kwargs: of Ray, without effect: it takes nothing from the cluster.
        max_in_flight: how many validations run at once (in Ray: always one).
    """

    fn: ValidationFn
    task_config: ValidationTaskConfig = field(default_factory=ValidationTaskConfig)
    ray_remote_kwargs: Mapping[str, Any] | None = None
    max_in_flight: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if not callable(self.fn):
            refuse(self, "fn", "a function that takes a checkpoint and returns a dict of metrics")
        take_default(self, "task_config", ValidationTaskConfig)
        take_int(self, "max_in_flight", "an int >= 1", low=1)

    def plan(self) -> ValidationPlan:
        """Return this in the form that workers use."""
        task = self.task_config
        call = partial(validate, self.fn)
        return ValidationPlan(call, dict(task.fn_kwargs), task.timeout_s, self.max_in_flight)


def validate(fn: ValidationFn, path: str, fn_kwargs: Mapping[str, Any]) -> str:
    """Call a validation function; returns its metrics as JSON.

    Raises:
        UsageError: it returned something else.
        Exception: whatever it raised.
    """
    found = fn(Checkpoint(path), **fn_kwargs)
    if not isinstance(found, Mapping):
        raise UsageError(
            f"the validation function returned a {type(found).__name__}, expected a dict of "
            f'metrics such as {{"accuracy": 0.9}}'
        )
    return to_json(found)


def request_of(validation: bool | ValidationTaskConfig) -> str:
    """Return the request of `train.report(validation=...)` as stored JSON; "" for none.

    Raises:
        UsageError: it is of another type, or its keywords are not JSON-serializable.
    """
    if validation is False:
        return ""
    task = ValidationTaskConfig() if validation is True else validation
    if not isinstance(task, ValidationTaskConfig):
        raise UsageError(
            f"train.report: validation is a {type(validation).__name__}, expected True, False or a "
            f"ValidationTaskConfig"
        )
    request = ValidationRequest(dict(task.fn_kwargs), task.timeout_s)
    try:
        text = request.to_json()
        if ValidationRequest.from_json(text) != request:
            raise TypeError("something would come back as something else, such as a tuple")
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"train.report: fn_kwargs of validation are kept beside the checkpoint as JSON, which "
            f"cannot represent them ({error}); give what is more than text, numbers, lists and "
            f"dicts in ValidationConfig(task_config=...)"
        ) from error
    return text
