"""Conversion of metrics to JSON files and back.

Rule: files store infinite numbers and NaN as text, "inf", "-inf" and "nan": JSON has no such
numbers, and readers of the files need not be Python. Reading metrics through the library returns
the numbers that were reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from elastic.errors import UsageError
from elastic.worker.base.numbers import plain_number

IN_WORDS = {text: float(text) for text in ("nan", "inf", "-inf")}


def to_json(metrics: Mapping[str, Any]) -> str:
    """Return metrics as a JSON object; the UsageError names what is not JSON-serializable."""
    plain = {}
    for name, value in checked(metrics).items():
        value = plain_number(value)
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"train.report: metric {name!r} is a {type(value).__name__}, which is not "
                f"JSON-serializable ({error}); report a number, e.g. tensor.mean().item()"
            ) from error
        plain[str(name)] = _in_words(value)
    return json.dumps(plain)


def from_json(text: str) -> dict[str, Any]:
    """Return metrics as they were reported, from what `to_json` has returned."""
    return as_reported(json.loads(text))


def as_reported(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics read from JSON, with "nan", "inf" and "-inf" as numbers.

    A reported string that equals one of these becomes a number, too.
    """
    return {name: _in_numbers(value) for name, value in metrics.items()}


def checked(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return metrics that are a mapping.

    Raises:
        UsageError: they are something else.
    """
    if not isinstance(metrics, Mapping):
        raise UsageError(
            f"train.report: metrics is a {type(metrics).__name__}, expected a dict such as "
            f'{{"loss": 0.5}}'
        )
    return metrics


def _in_words(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, dict):
        return {key: _in_words(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_words(part) for part in value]
    return value


def _in_numbers(value: Any) -> Any:
    if isinstance(value, str):
        return IN_WORDS.get(value, value)
    if isinstance(value, dict):
        return {key: _in_numbers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_in_numbers(part) for part in value]
    return value
