"""Preprocessors: what is learnt from one dataset, and applied to others, as Ray Data has them.

    scaler = StandardScaler(columns=["age"]).fit(train_ds)
    train_ds, valid_ds = scaler.transform(train_ds), scaler.transform(valid_ds)
    text = scaler.serialize()  # Beside a checkpoint; Preprocessor.deserialize(text) reads it.

Rule: `fit` reads the dataset once, in order, and what it learns does not depend on the sizes of
batches but for rounding. Missing values are not counted, and stay missing.
"""

from __future__ import annotations

import base64
import hashlib
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

from elastic.data.batches import pandas, taken_from, to_pandas
from elastic.data.dataset import Dataset
from elastic.data.moments import Moments, floats_of
from elastic.errors import UsageError

BATCH_ROWS = 8192
"""Rows that `fit` reads at once."""


class Preprocessor:
    """Something that is fitted to a dataset, and then transforms datasets and batches.

    One's own override `_transform_pandas` or `_transform_numpy`, as in Ray, and `_fit`, which sets
    what is learnt as `stats_`, unless there is nothing to learn: `_is_fittable = False`.
    """

    _is_fittable = True
    _is_fitted = False
    stats_: dict[str, Any] | None = None

    def fit(self, ds: Dataset) -> Preprocessor:
        """Learn from a dataset; return self."""
        if self._is_fittable:
            self._fit(ds)
            self._is_fitted = True
        return self

    def fit_transform(self, ds: Dataset, **others: Any) -> Dataset:
        """Learn from a dataset, and transform it; `others` as of `transform`, "transform_..."."""
        given = {name.removeprefix("transform_"): value for name, value in others.items()}
        return self.fit(ds).transform(ds, **given)

    def transform(self, ds: Dataset, *, batch_size: int | None = None, **others: Any) -> Dataset:
        """Return the dataset transformed; nothing is computed before its rows are requested.

        Args:
            ds: the dataset.
            batch_size: maximum rows of a call.
            others: Ray's placement arguments, without effect here.

        Raises:
            UsageError: it was not fitted.
        """
        self._check_fitted()
        return ds.map_batches(
            self._transform_numpy if self._takes_arrays else self._transformed,
            batch_format="numpy" if self._takes_arrays else "pandas",
            batch_size=batch_size or "default",
            **others,
        )

    def transform_batch(self, data: Any) -> Any:
        """Transform one batch: a DataFrame, or a mapping of arrays, which comes back as such."""
        self._check_fitted()
        pd = pandas()
        if self._takes_arrays:
            found = self._transform_numpy(taken_from(data, type(self).__name__))
            return to_pandas(found) if isinstance(data, pd.DataFrame) else found
        if isinstance(data, pd.DataFrame):
            return self._transformed(data)
        frame = self._transformed(pd.DataFrame({name: list(v) for name, v in data.items()}))
        return {name: np.asarray(frame[name].tolist()) for name in frame.columns}

    def serialize(self) -> bytes:
        """Return this preprocessor, with what it has learnt; in JSON with `decode("ascii")`."""
        return base64.b64encode(cloudpickle.dumps(self))

    @staticmethod
    def deserialize(serialized: bytes | str) -> Preprocessor:
        """Return a preprocessor from the result of `serialize`; unpickling can run code.

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
        if self._is_fittable and not self._is_fitted:
            raise UsageError(
                f"{type(self).__name__}: call fit(ds) before it transforms anything, or "
                f"fit_transform(ds)"
            )

    @property
    def _takes_arrays(self) -> bool:
        kind = type(self)
        takes_frames = kind._transform_pandas is not Preprocessor._transform_pandas
        return not takes_frames and kind._transform_numpy is not Preprocessor._transform_numpy

    def _transformed(self, frame: Any) -> Any:
        return self._transform_pandas(frame.copy(deep=False))

    def _fit(self, ds: Dataset) -> Preprocessor:
        """Learn from the dataset; return self."""
        self.stats_ = self._learn(ds)
        return self

    def _learn(self, ds: Dataset) -> dict[str, Any]:
        """Return what is learnt from the dataset, by column."""
        raise UsageError(f"{type(self).__name__}: expected _fit(ds), or _is_fittable = False")

    def _transform_pandas(self, frame: Any) -> Any:
        """Return a DataFrame, which is ours to change, transformed."""
        raise UsageError(f"{type(self).__name__}: expected _transform_pandas or _transform_numpy")

    def _transform_numpy(self, np_data: Any) -> Any:
        """Return a dict of arrays transformed."""
        return self._transform_pandas(np_data)

    def __repr__(self) -> str:
        own = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        given = {k: v for k, v in own.items() if not k.endswith("_") and v is not None}
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


def counts_of(
    ds: Dataset, columns: Sequence[str], what: str, *, whole_lists: bool = False
) -> dict[str, Counter[Any]]:
    """Return how often each value occurs in some columns; of lists, each of their elements.

    With `whole_lists` a list is a value, as a tuple.

    Raises:
        UsageError: a column is missing.
    """
    found: dict[str, Counter[Any]] = {name: Counter() for name in columns}
    for frame in _frames(ds, columns, what):
        for name, counts in found.items():
            for value in frame[name].dropna().tolist():
                key = _key(value)
                counts.update(key if _is_list(value) and not whole_lists else (key,))
    return found


def _key(value: Any) -> Any:
    """Return a value as a key: a list as a tuple of its elements."""
    return tuple(np.asarray(value).tolist()) if _is_list(value) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, np.ndarray))


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

    def _transform_pandas(self, frame: Any) -> Any:
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

    def _learn(self, ds: Dataset) -> dict[str, Any]:
        return moments_of(ds, self.columns, "StandardScaler")

    def _column(self, name: str, values: Any) -> Any:
        moments: Moments = self._learnt(name)
        return (values - moments.mean) / (moments.std() or 1.0)


class MinMaxScaler(_OfColumns):
    """Maps the range of a column to 0 to 1."""

    def _learn(self, ds: Dataset) -> dict[str, Any]:
        return moments_of(ds, self.columns, "MinMaxScaler")

    def _column(self, name: str, values: Any) -> Any:
        moments: Moments = self._learnt(name)
        return (values - moments.low) / ((moments.high - moments.low) or 1.0)


class MaxAbsScaler(_OfColumns):
    """Divides a column by its largest absolute value."""

    def _learn(self, ds: Dataset) -> dict[str, Any]:
        return moments_of(ds, self.columns, "MaxAbsScaler")

    def _column(self, name: str, values: Any) -> Any:
        moments: Moments = self._learnt(name)
        return values / (max(abs(moments.low), abs(moments.high)) or 1.0)


class SimpleImputer(_OfColumns):
    """Replaces missing values by the mean, the most frequent value, or a constant."""

    STRATEGIES = ("mean", "most_frequent", "constant")

    @property
    def _is_fittable(self) -> bool:  # type: ignore[override]
        """Return whether the values of columns matter."""
        return self.strategy != "constant"

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

    def _learn(self, ds: Dataset) -> dict[str, Any]:
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
        return values.fillna(self._learnt(name) if self._is_fittable else self.fill_value)


class OrdinalEncoder(_OfColumns):
    """Replaces values by their places among the sorted values of the column; others are missing.

    Lists become lists of places.
    """

    def __init__(
        self,
        columns: Sequence[str],
        *,
        encode_lists: bool = True,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns.

        Args:
            columns: to be transformed.
            encode_lists: False: a list is a value like others, and becomes one place.
            output_columns: where the places go.
        """
        super().__init__(columns, output_columns)
        self.encode_lists = encode_lists

    def _learn(self, ds: Dataset) -> dict[str, Any]:
        whole = not self.encode_lists
        counts = counts_of(ds, self.columns, type(self).__name__, whole_lists=whole)
        return {name: _numbered(one) for name, one in counts.items()}

    def _column(self, name: str, values: Any) -> Any:
        places: dict[Any, int] = self._learnt(name)
        if not any(map(_is_list, values)):
            return values.map(places)
        if not self.encode_lists:
            return [places.get(_key(value)) for value in values]
        return [[places.get(one) for one in value] if _is_list(value) else None for value in values]


class LabelEncoder(OrdinalEncoder):
    """Replaces the labels of one column by whole numbers."""

    def __init__(self, label_column: str, output_column: str | None = None) -> None:
        """Choose the column.

        Args:
            label_column: of the labels.
            output_column: where the numbers go; by default in their place.
        """
        into = None if output_column is None else [output_column]
        super().__init__([label_column], output_columns=into)
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
    """Replaces a value by a vector with a one at its place; all zeros for a value not seen.

    Places are those of the sorted values; with `max_categories`, the most frequent come first. A
    list is one value.
    """

    whole_lists = True

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

    def _learn(self, ds: Dataset) -> dict[str, Any]:
        most, whole = self.max_categories or {}, self.whole_lists
        counts = counts_of(ds, self.columns, type(self).__name__, whole_lists=whole)
        return {
            name: _placed(one.most_common(most[name])) if name in most else _numbered(one)
            for name, one in counts.items()
        }

    def _column(self, name: str, values: Any) -> Any:
        return _vectors(values, self._learnt(name), lambda value: (_key(value),), counts=False)


class MultiHotEncoder(OneHotEncoder):
    """Replaces a list by a vector with ones at the places of its elements."""

    whole_lists = False

    def _column(self, name: str, values: Any) -> Any:
        def parts(value: Any) -> Iterable[Any]:
            return value if _is_list(value) else (value,)

        return _vectors(values, self._learnt(name), parts, counts=False)


class Categorizer(_OfColumns):
    """Makes a column one of pandas' categories: those that occur, or those of a given dtype."""

    def __init__(
        self,
        columns: Sequence[str],
        dtypes: Mapping[str, Any] | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns; `dtypes` has a pandas.CategoricalDtype for some of them."""
        super().__init__(columns, output_columns)
        self.dtypes = dict(dtypes or {})

    def _learn(self, ds: Dataset) -> dict[str, Any]:
        open_ = [name for name in self.columns if name not in self.dtypes]
        counts = counts_of(ds, open_, "Categorizer") if open_ else {}
        found = {name: pandas().CategoricalDtype(list(_numbered(c))) for name, c in counts.items()}
        return {**self.dtypes, **found}

    def _column(self, name: str, values: Any) -> Any:
        dtype = self._learnt(name)
        return values.where(values.isin(dtype.categories)).astype(dtype)


class RobustScaler(_OfColumns):
    """Subtracts the median of a column, and divides by the distance of two of its quantiles.

    `fit` holds the numbers of its columns in memory.
    """

    def __init__(
        self,
        columns: Sequence[str],
        quantile_range: tuple[float, float] = (0.25, 0.75),
        output_columns: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns, and the two quantiles."""
        super().__init__(columns, output_columns)
        self.quantile_range = tuple(quantile_range)

    def _learn(self, ds: Dataset) -> dict[str, Any]:
        held: dict[str, list[Any]] = {name: [] for name in self.columns}
        for frame in _frames(ds, self.columns, "RobustScaler"):
            for name, parts in held.items():
                parts.append(floats_of(frame[name]))
        low, high = self.quantile_range
        return {
            name: np.nanquantile(np.concatenate([*parts, [np.nan]]), (low, 0.5, high)).tolist()
            for name, parts in held.items()
        }

    def _column(self, name: str, values: Any) -> Any:
        low, middle, high = self._learnt(name)
        return (values - middle) / ((high - low) or 1.0)


class PowerTransformer(_OfColumns):
    """Makes a column more normally distributed, by a power as Yeo and Johnson, or Box and Cox."""

    _is_fittable = False
    METHODS = ("yeo-johnson", "box-cox")

    def __init__(
        self,
        columns: Sequence[str],
        power: float,
        method: str = "yeo-johnson",
        output_columns: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns, the power and the method.

        Raises:
            UsageError: no such method.
        """
        super().__init__(columns, output_columns)
        self.power, self.method = power, method
        if method not in self.METHODS:
            raise UsageError(
                f"PowerTransformer: method={method!r}: expected one of {', '.join(self.METHODS)}"
            )

    def _column(self, name: str, values: Any) -> Any:
        x = floats_of(values)
        if self.method == "box-cox":
            return _power(x, self.power)
        return np.where(
            x >= 0, _power(x.clip(0) + 1, self.power), -_power(1 - x.clip(max=0), 2 - self.power)
        )


def _power(x: Any, power: float) -> Any:
    return np.log(x) if power == 0 else (x**power - 1) / power


class CustomKBinsDiscretizer(_OfColumns):
    """Replaces a number by that of the bin in which it lies; missing outside of all bins."""

    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        bins: Any,
        *,
        right: bool = True,
        include_lowest: bool = False,
        duplicates: str = "raise",
        dtypes: Mapping[str, Any] | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns, and the bins as pandas.cut has them.

        Args:
            columns: to be transformed.
            bins: edges for all columns, or a dict of edges by column.
            right: a bin has its right edge, and not its left one.
            include_lowest: the first bin has its left edge, too.
            duplicates: "drop" to leave out equal edges.
            dtypes: by column, a pandas.CategoricalDtype with a name for each bin.
            output_columns: where the numbers go.
        """
        super().__init__(columns, output_columns)
        self.bins = bins
        self.right = right
        self.include_lowest = include_lowest
        self.duplicates = duplicates
        self.dtypes = dict(dtypes or {})

    def _edges(self, name: str) -> Any:
        return self.bins[name] if isinstance(self.bins, Mapping) else self.bins

    def _column(self, name: str, values: Any) -> Any:
        names = getattr(self.dtypes.get(name), "categories", None)
        return pandas().cut(
            values,
            self._edges(name),
            right=self.right,
            labels=False if names is None else list(names),
            include_lowest=self.include_lowest,
            duplicates=self.duplicates,
        )


class UniformKBinsDiscretizer(CustomKBinsDiscretizer):
    """The same with `bins` bins of equal width, a number for all columns or a dict by column."""

    _is_fittable = True

    def _learn(self, ds: Dataset) -> dict[str, Any]:
        found = {}
        for name, one in moments_of(ds, self.columns, type(self).__name__).items():
            # The edges are a thousandth wider, so that the lowest or the highest number has a bin.
            wider = 0.001 * (one.high - one.low or abs(one.low) or 1.0)
            is_flat = one.low == one.high
            low, high = one.low - wider * is_flat, one.high + wider * is_flat
            edges = np.linspace(low, high, int(super()._edges(name)) + 1)
            if not is_flat and self.right:
                edges[0] -= wider
            elif not is_flat:
                edges[-1] += wider
            found[name] = edges.tolist()
        return found

    def _edges(self, name: str) -> Any:
        return self._learnt(name)


class Normalizer(_OfColumns):
    """Scales each row to length 1, over its columns."""

    _is_fittable = False
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

    def _transform_pandas(self, frame: Any) -> Any:
        _check_columns(self.columns, list(frame.columns), "Normalizer")
        values = frame[self.columns].to_numpy(dtype=np.float64)
        order = {"l1": 1, "l2": 2, "max": np.inf}[self.norm]
        lengths = np.linalg.norm(values, ord=order, axis=1, keepdims=True)
        frame[self.output_columns or self.columns] = values / np.where(lengths == 0, 1.0, lengths)
        return frame


class Concatenator(Preprocessor):
    """Makes one vector column of several columns of numbers, which it removes."""

    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        output_column_name: str = "concat_out",
        dtype: Any = None,
        raise_if_missing: bool = False,
        flatten: bool = True,
    ) -> None:
        """Choose the columns.

        Args:
            columns: in the order of the vector; a column may hold vectors itself.
            output_column_name: of the vectors.
            dtype: of their elements; by default that of the columns.
            raise_if_missing: refuse rows without one of the columns, which otherwise is left out.
            flatten: Ray's, without effect: vectors are always taken apart.
        """
        del flatten
        super().__init__()
        self.columns, self.output_column_name = list(columns), output_column_name
        self.dtype, self.raise_if_missing = dtype, raise_if_missing

    def _transform_pandas(self, frame: Any) -> Any:
        if self.raise_if_missing:
            _check_columns(self.columns, list(frame.columns), "Concatenator")
        names = [name for name in self.columns if name in frame.columns]
        whole = np.concatenate([_flat(frame[name].to_numpy()) for name in names], axis=1)
        dtype = np.float64 if whole.dtype == object else whole.dtype  # None is NaN.
        rest = frame.drop(columns=names)
        rest[self.output_column_name] = list(whole.astype(self.dtype or dtype))
        return rest


def _flat(values: Any) -> Any:
    """Return a vector for each value of a column, which may be a vector itself."""
    found = np.asarray(values.tolist()) if values.dtype == object else values
    return found.reshape(len(found), math.prod(found.shape[1:]))


class Tokenizer(_OfColumns):
    """Replaces a text by the list of its tokens."""

    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        tokenization_fn: Callable[[str], Sequence[str]] | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns, and what makes a list of a text; by default, cut at single spaces."""
        super().__init__(columns, output_columns)
        self.tokenization_fn = tokenization_fn or _cut

    def _column(self, name: str, values: Any) -> Any:
        return [None if one is None or one != one else self.tokenization_fn(one) for one in values]


class CountVectorizer(Tokenizer):
    """Replaces a text by a vector of how often each token occurs, the most frequent token first."""

    _is_fittable = True

    def __init__(
        self,
        columns: Sequence[str],
        tokenization_fn: Callable[[str], Sequence[str]] | None = None,
        max_features: int | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns, as `Tokenizer`, and how many of the most frequent tokens count."""
        super().__init__(columns, tokenization_fn, output_columns)
        self.max_features = max_features

    def _learn(self, ds: Dataset) -> dict[str, Any]:
        found: dict[str, Counter[str]] = {name: Counter() for name in self.columns}
        for frame in _frames(ds, self.columns, "CountVectorizer"):
            for name, counts in found.items():
                for tokens in super()._column(name, frame[name]):
                    counts.update(tokens or ())
        return {name: _placed(one.most_common(self.max_features)) for name, one in found.items()}

    def _column(self, name: str, values: Any) -> Any:
        return _vectors(super()._column(name, values), self._learnt(name), list, counts=True)


class HashingVectorizer(Tokenizer):
    """Replaces a text by a vector of how many of its tokens have each of `num_features` hashes."""

    def __init__(
        self,
        columns: Sequence[str],
        num_features: int,
        tokenization_fn: Callable[[str], Sequence[str]] | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        """Choose the columns, as `Tokenizer`, and the length of the vectors."""
        super().__init__(columns, tokenization_fn, output_columns)
        self.num_features = num_features

    def _column(self, name: str, values: Any) -> Any:
        places = {number: number for number in range(self.num_features)}

        def hashes(tokens: Sequence[str]) -> list[int]:
            return [_hash(token, self.num_features) for token in tokens]

        return _vectors(super()._column(name, values), places, hashes, counts=True)


class FeatureHasher(Preprocessor):
    """Adds up columns of counts, whose names have the same hash, to a vector of `num_features`."""

    _is_fittable = False

    def __init__(self, columns: Sequence[str], num_features: int, output_column: str) -> None:
        """Choose the columns, the length of the vectors, and where they go."""
        super().__init__()
        self.columns, self.num_features = list(columns), num_features
        self.output_column = output_column

    def _transform_pandas(self, frame: Any) -> Any:
        _check_columns(self.columns, list(frame.columns), "FeatureHasher")
        rows = np.zeros((len(frame), self.num_features))
        for name in self.columns:
            rows[:, _hash(name, self.num_features)] += floats_of(frame[name])
        frame[self.output_column] = list(rows)
        return frame


class TorchVisionPreprocessor(_OfColumns):
    """Applies a transform of torchvision to images."""

    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        transform: Callable[[Any], Any],
        output_columns: Sequence[str] | None = None,
        batched: bool = False,
    ) -> None:
        """Choose the columns and the transform.

        Args:
            columns: of images, as arrays.
            transform: takes a tensor, or if it refuses that an array; returns one of these.
            output_columns: where the results go.
            batched: call it with all images of a batch, as one tensor.
        """
        super().__init__(columns, output_columns)
        self.torchvision_transform, self.batched = transform, batched

    def _column(self, name: str, values: Any) -> Any:
        if self.batched:
            return list(self._array_of(np.stack(values.tolist())))
        return [self._array_of(one) for one in values]

    def _array_of(self, image: Any) -> Any:
        import torch

        image = np.array(image)  # A copy, which the transform may write to.
        try:
            found = self.torchvision_transform(torch.as_tensor(image))
        except TypeError:  # Of transforms such as ToTensor.
            found = self.torchvision_transform(image)
        if not isinstance(found, (torch.Tensor, np.ndarray)):
            raise UsageError(
                f"TorchVisionPreprocessor: the transform returned a {type(found).__name__}: "
                f"expected a tensor or an array"
            )
        return np.asarray(found)


class Chain(Preprocessor):
    """Preprocessors, each of which is fitted to what those before it make of the dataset."""

    def __init__(self, *preprocessors: Preprocessor) -> None:
        """Take them in order."""
        super().__init__()
        self.preprocessors = preprocessors

    def _check_fitted(self) -> None:
        for one in self.preprocessors:
            one._check_fitted()

    def _learn(self, ds: Dataset) -> dict[str, Any]:
        for one in self.preprocessors:
            ds = one.fit_transform(ds)
        return {}

    def _transform_pandas(self, frame: Any) -> Any:
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


def _placed(counts: Sequence[tuple[Any, int]]) -> dict[Any, int]:
    return {value: number for number, (value, _) in enumerate(counts)}


def _vectors(
    values: Iterable[Any],
    places: Mapping[Any, int],
    parts: Callable[[Any], Iterable[Any]],
    *,
    counts: bool,
) -> list[Any]:
    """Return a vector for each value: how often its parts are at each place, or whether.

    Args:
        values: such as labels, lists or lists of tokens; None has no parts.
        places: of parts that count.
        parts: returns those of a value.
        counts: how often; False: whether.
    """
    found = []
    for value in values:
        row = np.zeros(len(places), np.int64 if counts else np.uint8)
        for part in () if value is None else parts(value):
            if (place := places.get(part)) is not None:
                row[place] = row[place] + 1 if counts else 1
        found.append(row)
    return found


def _cut(text: str) -> list[str]:
    return text.split(" ")


def _hash(value: str, size: int) -> int:
    """Return a number below `size`, the same in each process and as in Ray."""
    return int(hashlib.sha256(str(value).encode()).hexdigest(), 16) % size
