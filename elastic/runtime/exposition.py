"""Metrics in Prometheus' text format (0.0.4), which every scraper reads.

Rule: a family is written completely: name, type and help, then its samples. Label names are fixed;
label values may come from users, and are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABEL_CHARS_MAX = 200


BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass
class Histogram:
    """Counts of durations in seconds, by bucket; longer ones are in a last bucket (+Inf)."""

    tops: Sequence[float] = BUCKETS_S
    counts: list[int] = field(default_factory=list)
    total_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.tops) + 1)

    def add(self, seconds: float) -> None:
        place = next((i for i, top in enumerate(self.tops) if seconds <= top), -1)
        self.counts[place] += 1
        self.total_s += seconds


@dataclass
class Family:
    """A metric and all its samples.

    Attributes:
        name: includes the unit; that of a counter ends in `_total`.
        kind: "gauge", "counter" or "histogram".
        about: help text of one line.
    """

    name: str
    kind: str
    about: str
    _lines: list[str] = field(default_factory=list)

    def add(self, value: float, **labels: object) -> Family:
        """Add a sample; returns the family."""
        self._lines.append(f"{self.name}{_labels(labels)} {_number(value)}")
        return self

    def add_histogram(self, values: Histogram, **labels: object) -> Family:
        """Add a histogram; returns the family."""
        so_far = 0
        for top, count in zip((*values.tops, math.inf), values.counts, strict=True):
            so_far += count
            bucket = _labels({**labels, "le": _number(top)})
            self._lines.append(f"{self.name}_bucket{bucket} {so_far}")
        self._lines.append(f"{self.name}_sum{_labels(labels)} {_number(values.total_s)}")
        self._lines.append(f"{self.name}_count{_labels(labels)} {so_far}")
        return self

    def text(self) -> str:
        """Return its lines, "" if it has no samples."""
        head = [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} {self.kind}"]
        return "\n".join((*head, *self._lines, "")) if self._lines else ""


def exposition(families: Iterable[Family]) -> str:
    """Return the reply to a scrape: the text of all families."""
    return "".join(family.text() for family in families)


def _labels(labels: dict[str, object]) -> str:
    pairs = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    cut = value[:LABEL_CHARS_MAX].encode("utf-8", "replace").decode()
    plain = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in cut)
    return plain.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
