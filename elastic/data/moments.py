"""Mean, deviation and range of a column of numbers, in one pass over its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Moments:
    """Of the numbers of a column.

    Attributes:
        count, mean: of those that are there.
        missing: how many are not there.
        squares: sum of the squared distances from the mean.
        low, high: the smallest and the largest.
    """

    count: int = 0
    missing: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = np.inf
    high: float = -np.inf

    def add(self, values: Any) -> None:
        """Add numbers (Chan, Golub and LeVeque's formula for two samples)."""
        there = ~np.isnan(values)
        self.missing += len(values) - int(there.sum())
        values = values[there]
        if not len(values):
            return
        count, mean = len(values), float(values.mean())
        squares, away = float(((values - mean) ** 2).sum()), mean - self.mean
        total = self.count + count
        self.squares += squares + away**2 * self.count * count / total
        self.mean += away * count / total
        self.count = total
        self.low, self.high = min(self.low, values.min()), max(self.high, values.max())

    def average(self) -> float:
        """Return the mean, NaN without a number."""
        return self.mean if self.count else float("nan")

    def std(self, ddof: int = 0) -> float:
        """Return the standard deviation, NaN of too few numbers."""
        return (self.squares / (self.count - ddof)) ** 0.5 if self.count > ddof else float("nan")


def floats_of(values: Any) -> Any:
    """Return a pandas Series, or an array, as an array of float64; NaN where one is missing.

    TypeError or ValueError if they are not numbers.
    """
    if hasattr(values, "to_numpy"):
        return values.to_numpy(dtype=np.float64, na_value=np.nan)
    if values.dtype == object:
        values = [np.nan if one is None else one for one in values]
    return np.asarray(values, np.float64)
