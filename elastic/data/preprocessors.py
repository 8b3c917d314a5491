"""Preprocessors: what is learnt from one dataset, and applied to others, as Ray Data has them.

    scaler = StandardScaler(columns=["age"]).fit(train_ds)
    train_ds, valid_ds = scaler.transform(train_ds), scaler.transform(valid_ds)
    text = scaler.serialize()  # Beside a checkpoint; Preprocessor.deserialize(text) reads it.

Rule: `fit` reads the dataset once, in order, and what it learns does not depend on the sizes of
batches but for rounding. Missing values are not counted, and stay missing.
"""

from __future__ import annotations

import base64
import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

from elastic.data.batches import pandas
from elastic.data.dataset import Dataset
from elastic.data.moments import Moments, floats_of
from elastic.errors import UsageError

BATCH_ROWS = 8192
"""Rows that `fit` reads at once."""


class Preprocessor(ABC):
    """Something that is fitted to a dataset, and then transforms datasets and batches."""

    needs_fit = True
    """Whether there is anything to learn."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.stats_: dict[str, Any] | None = None

    def fit(self, ds: Dataset) -> Preprocessor:
        """Learn from a dataset; return self."""
        self.stats_ = self._fit(ds) if self.needs_fit else {}
        return self

    def fit_transform(self, ds: Dataset) -> Dataset:
        """Learn from a dataset, and transform it."""
        return self.fit(ds).transform(ds)

    def transform(self, ds: Dataset) -> Dataset:
        """Return the dataset transformed; nothing is computed before its rows are requested.

        Raises:
            UsageError: it was not fitted.
        """
        self._check_fitted()
        return ds.map_batches(self._transformed, batch_format="pandas")

    def transform_batch(self, data: Any) -> Any:
        """Transform one batch: a DataFrame, or a mapping of arrays, which comes back as such."""
        self._check_fitted()
        pd = pandas()
        if isinstance(data, pd.DataFrame):
            return self._transformed(data)
        frame = self._transformed(pd.DataFrame({name: list(v) for name, v in data.items()}))
        return {name: np.asarray(frame[name].tolist()) for name in frame.columns}

    def serialize(self) -> bytes:
        """Return this preprocessor, with what it has learnt; in JSON with `decode("ascii")`."""
        return base64.b64encode(cloudpickle.dumps(self))

    @staticmethod
    def deserialize(serialized: bytes | str) -> Preprocessor:
        """Return a preprocessor from what `serialize` gave; only from one that you trust.

        Raises:
            UsageError: it is none.
        """
        try:
            found = pickle.loads(base64.b64decode(serialized, validate=True))
        except Exception as error:  # Of base64, pickle, or a module that is not here.
            raise UsageError(
                f"Preprocessor.deserialize: expected a text of serialize(), whole and made with "
                f"packages that are here too: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(found, Preprocessor):
            raise UsageError(
                f"Preprocessor.deserialize: expected a text of serialize(), got one of a "
                f"{type(found).__name__}"
            )
        return found

    def _check_fitted(self) -> None:
        if self.stats_ is None and self.needs_fit:
            raise UsageError(
                f"{type(self).__name__}: call fit(ds) before it transforms anything, or "
                f"fit_transform(ds)"
            )

    def _transformed(self, frame: Any) -> Any:
        return self._apply(frame.copy(deep=False))

    def _fit(self, ds: Dataset) -> dict[str, Any]:
        """Return what is learnt from the dataset, by column."""
        return {}

    @abstractmethod
    def _apply(self, frame: Any) -> Any:
        """Return a DataFrame, which is ours to change, transformed."""

    def __repr__(self) -> str:
        given = {k: v for k, v in vars(self).items() if not k.endswith("_") and v is not None}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"


def moments_of(ds: Dataset, columns: Sequence[str], what: str) -> dict[str, Moments]:
    """Return the moments of some columns.

    Raises:
        UsageError: a column is missing, or has no numbers.
    """
    found = {name: Moments() for name in columns}
    for frame in _frames(ds, columns, what):
        for name, moments in found.items():
            try:
                moments.add(floats_of(frame[name]))
            except (TypeError, ValueError) as error:
                raise UsageError(f"{what}: column {name!r} is not of numbers: {error}") from error
    return found


def counts_of(ds: Dataset, columns: Sequence[str], what: str) -> dict[str, Counter[Any]]:
    """Return how often each value occurs in some columns.

    Raises:
        UsageError: a column is missing.
    """
    found: dict[str, Counter[Any]] = {name: Counter() for name in columns}
    for frame in _frames(ds, columns, what):
        for name, counts in found.items():
            counts.update(frame[name].dropna().tolist())
    return found


def _frames(ds: Dataset, columns: Sequence[str], what: str) -> Any:
    _check_columns(columns, ds.columns(), what)
    chosen = ds.select_columns(list(columns))
    return chosen.iter_batches(batch_size=BATCH_ROWS, batch_format="pandas")


def _check_columns(columns: Sequence[str], known: Sequence[str], what: str) -> None:
    missing = [name for name in columns if name not in known]
    if missing:
        raise UsageError(f"{what}: no column {missing[0]!r}: expected one of {', '.join(known)}")


class _OfColumns(Preprocessor):
    """Transforms columns, in place or into others."""

    def __init__(self, columns: Sequence[str], output_columns: Sequence[str] | None = None) -> None:
        """Choose the columns.

        Args:
            columns: to be transformed.
            output_columns: where the results go, in the same order; by default in their place.

        Raises:
            UsageError: there are more of one than of the other.
        """
        super().__init__()
        if isinstance(columns, str):
            raise UsageError(f"{type(self).__name__}: columns={columns!r}: expected a list of them")
        self.columns = list(columns)
        self.output_columns = None if output_columns is None else list(output_columns)
        if output_columns is not None and len(output_columns) != len(columns):
            raise UsageError(
                f"{type(self).__name__}: {len(columns)} columns and {len(output_columns)} "
                f"output_columns: expected as many"
            )

    def _apply(self, frame: Any) -> Any:
        _check_columns(self.columns, list(frame.columns), type(self).__name__)
        results = {
            into: self._column(name, frame[name])
            for name, into in zip(self.columns, self.output_columns or self.columns, strict=True)
        }
        for into, values in results.items():
            frame[into] = values
        return frame

    def _column(self, name: str, values: Any) -> Any:
        raise NotImplementedError

    def _learnt(self, name: str) -> Any:
        return (self.stats_ or {})[name]


class StandardScaler(_OfColumns):
    """Subtracts the mean of a column, and divides by its standard deviation (ddof=0)."""

    def _fit(self, ds: Dataset) -> dict[str, Any]:
        return moments_of(ds, self.columns, "StandardScaler")

    def _column(self, name: str, values: Any) -> Any:
        moments: Moments = self._learnt(name)
        return (values - moments.mean) / (moments.std() or 1.0)


class MinMaxScaler(_OfColumns):
    """Maps the range of a column to 0 to 1."""

    def _fit(self, ds: Dataset) -> dict[str, Any]:
        return moments_of(ds, self.columns, "MinMaxScaler")

    def _column(self, name: str, values: Any) -> Any:
        moments: Moments = self._learnt(name)
        return (values - moments.low) / ((moments.high - moments.low) or 1.0)


class MaxAbsScaler(_OfColumns):
    """Divides a column by its largest absolute value."""

    def _fit(self, ds: Dataset) -> dict[str, Any]:
        return moments_of(ds, self.columns, "MaxAbsScaler")

    def _column(self, name: str, values: Any) -> Any:
        moments: Moments = self._learnt(name)
        return values / (max(abs(moments.low), abs(moments.high)) or 1.0)


class SimpleImputer(_OfColumns):
    """Replaces missing values by the mean, the most frequent value, or a constant."""

    STRATEGIES = ("mean", "most_frequent", "constant")

    def __init__(
        self,
        columns: Sequence[str],
        strategy: str = "mean",
        fill_value: Any = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns, and what replaces missing values.

        Args:
            columns: to be transformed.
            strategy: one of `STRATEGIES`.
            fill_value: of the strategy "constant".
            output_columns: where the results go.

        Raises:
            UsageError: no such strategy, or a constant is missing.
        """
        super().__init__(columns, output_columns)
        self.strategy, self.fill_value = strategy, fill_value
        if strategy not in self.STRATEGIES:
            raise UsageError(
                f"SimpleImputer: strategy={strategy!r}: expected one of "
                f"{', '.join(self.STRATEGIES)}"
            )
        if (strategy == "constant") != (fill_value is not None):
            raise UsageError(
                "SimpleImputer: fill_value is for strategy='constant', and needed there"
            )

    def _fit(self, ds: Dataset) -> dict[str, Any]:
        if self.strategy == "constant":
            return dict.fromkeys(self.columns, self.fill_value)
        if self.strategy == "mean":
            found = moments_of(ds, self.columns, "SimpleImputer")
            means = {name: one.mean if one.count else None for name, one in found.items()}
        else:
            counts = counts_of(ds, self.columns, "SimpleImputer")
            # The first of several that occur equally often.
            means = {
                name: one.most_common(1)[0][0] if one else None for name, one in counts.items()
            }
        empty = [name for name, value in means.items() if value is None]
        if empty:
            raise UsageError(f"SimpleImputer: column {empty[0]!r} has no value at all")
        return means

    def _column(self, name: str, values: Any) -> Any:
        return values.fillna(self._learnt(name))


class OrdinalEncoder(_OfColumns):
    """Replaces values by their places among the sorted values of the column; others are missing."""

    def _fit(self, ds: Dataset) -> dict[str, Any]:
        counts = counts_of(ds, self.columns, type(self).__name__)
        return {name: _numbered(one) for name, one in counts.items()}

    def _column(self, name: str, values: Any) -> Any:
        return values.map(self._learnt(name))


class LabelEncoder(OrdinalEncoder):
    """Replaces the labels of one column by whole numbers."""

    def __init__(self, label_column: str, output_column: str | None = None) -> None:
        """Choose the column.

        Args:
            label_column: of the labels.
            output_column: where the numbers go; by default in their place.
        """
        super().__init__([label_column], None if output_column is None else [output_column])
        self.label_column = label_column

    def inverse_transform(self, ds: Dataset) -> Dataset:
        """Return a dataset with labels in the place of numbers.

        Raises:
            UsageError: it was not fitted.
        """
        self._check_fitted()
        labels = {number: label for label, number in self._learnt(self.label_column).items()}
        into = (self.output_columns or self.columns)[0]

        def inverted(frame: Any) -> Any:
            return frame.assign(**{self.label_column: frame[into].map(labels)})

        return ds.map_batches(inverted, batch_format="pandas")


class OneHotEncoder(_OfColumns):
    """Replaces a value by a vector with a one at its place; all zeros for a value not seen."""

    def __init__(
        self,
        columns: Sequence[str],
        max_categories: Mapping[str, int] | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns.

        Args:
            columns: to be transformed.
            max_categories: by column, how many of the most frequent values count.
            output_columns: where the vectors go.
        """
        super().__init__(columns, output_columns)
        self.max_categories = None if max_categories is None else dict(max_categories)

    def _fit(self, ds: Dataset) -> dict[str, Any]:
        most = self.max_categories or {}
        counts = counts_of(ds, self.columns, "OneHotEncoder")
        return {
            name: _numbered(dict(one.most_common(most.get(name)))) for name, one in counts.items()
        }

    def _column(self, name: str, values: Any) -> Any:
        places: dict[Any, int] = self._learnt(name)
        rows = np.zeros((len(values), len(places)), np.uint8)
        for row, value in enumerate(values):
            if (place := places.get(value)) is not None:
                rows[row, place] = 1
        return list(rows)


class Normalizer(_OfColumns):
    """Scales each row to length 1, over its columns."""

    needs_fit = False
    NORMS = ("l1", "l2", "max")

    def __init__(
        self,
        columns: Sequence[str],
        norm: str = "l2",
        output_columns: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns and the norm.

        Raises:
            UsageError: no such norm.
        """
        super().__init__(columns, output_columns)
        self.norm = norm
        if norm not in self.NORMS:
            raise UsageError(f"Normalizer: norm={norm!r}: expected one of {', '.join(self.NORMS)}")

    def _apply(self, frame: Any) -> Any:
        _check_columns(self.columns, list(frame.columns), "Normalizer")
        values = frame[self.columns].to_numpy(dtype=np.float64)
        order = {"l1": 1, "l2": 2, "max": np.inf}[self.norm]
        lengths = np.linalg.norm(values, ord=order, axis=1, keepdims=True)
        frame[self.output_columns or self.columns] = values / np.where(lengths == 0, 1.0, lengths)
        return frame


class Concatenator(Preprocessor):
    """Makes one vector column of several columns of numbers, which it removes."""

    needs_fit = False

    def __init__(
        self,
        columns: Sequence[str],
        output_column_name: str = "concat_out",
        dtype: Any = None,
        raise_if_missing: bool = False,
    ) -> None:
        """Choose the columns.

        Args:
            columns: in the order of the vector; a column may hold vectors itself.
            output_column_name: of the vectors.
            dtype: of their elements; by default that of the columns.
            raise_if_missing: refuse rows without one of the columns, which otherwise is left out.
        """
        super().__init__()
        self.columns, self.output_column_name = list(columns), output_column_name
        self.dtype, self.raise_if_missing = dtype, raise_if_missing

    def _apply(self, frame: Any) -> Any:
        if self.raise_if_missing:
            _check_columns(self.columns, list(frame.columns), "Concatenator")
        names = [name for name in self.columns if name in frame.columns]
        parts = [np.asarray(frame[name].tolist()).reshape(len(frame), -1) for name in names]
        rest = frame.drop(columns=names)
        rest[self.output_column_name] = list(np.concatenate(parts, axis=1).astype(self.dtype))
        return rest


class Chain(Preprocessor):
    """Preprocessors, each of which is fitted to what those before it make of the dataset."""

    def __init__(self, *preprocessors: Preprocessor) -> None:
        """Take them in order."""
        super().__init__()
        self.preprocessors = preprocessors

    def _fit(self, ds: Dataset) -> dict[str, Any]:
        for one in self.preprocessors:
            ds = one.fit_transform(ds)
        return {}

    def _apply(self, frame: Any) -> Any:
        for one in self.preprocessors:
            frame = one.transform_batch(frame)
        return frame


def _numbered(values: Mapping[Any, Any]) -> dict[Any, int]:
    """Return a number for each value, in their order; of different kinds in that of their texts."""
    try:
        ordered = sorted(values)
    except TypeError:
        ordered = sorted(values, key=lambda value: (type(value).__name__, str(value)))
    return {value: number for number, value in enumerate(ordered)}
