"""elastic.data.preprocessors: what they learn, what they make of rows, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from elastic import data
from elastic.data import preprocessors as of
from elastic.data.aggregate import Max
from elastic.data.preprocessor import Preprocessor
from elastic.errors import UsageError

ROWS = 20_000
"""More than `fit` reads at once."""


def numbers() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    x = rng.normal(1e4, 3.0, ROWS)
    x[::7] = np.nan
    return pd.DataFrame({"x": x, "y": rng.integers(-9, 4, ROWS), "same": 5})


def column(ds: Any, name: str) -> Any:
    return np.asarray([row[name] for row in ds.take_all()], np.float64)


def test_scalers_do_what_one_pass_over_all_rows_says() -> None:
    frame = numbers()
    ds = data.from_pandas(frame)
    x, y = frame["x"].to_numpy(), frame["y"].to_numpy()
    assert ds.mean("x") == pytest.approx(np.nanmean(x))
    assert ds.std("x") == pytest.approx(np.nanstd(x, ddof=1), rel=1e-9)
    assert np.isnan(ds.limit(1).std("y"))
    standard = of.StandardScaler(columns=["x", "same"]).fit_transform(ds)
    right = (x - np.nanmean(x)) / np.nanstd(x)
    assert column(standard, "x") == pytest.approx(right, rel=1e-6, nan_ok=True)
    assert not column(standard, "same").any()
    ranged = of.MinMaxScaler(["y"], output_columns=["z"]).fit_transform(ds)
    assert column(ranged, "z") == pytest.approx((y + 9) / 12)
    assert column(ranged, "y").tolist() == y.tolist()
    assert column(of.MaxAbsScaler(["y"]).fit_transform(ds), "y") == pytest.approx(y / 9)
    unit = of.Normalizer(["y", "same"]).transform(ds)
    assert column(unit, "y") ** 2 + column(unit, "same") ** 2 == pytest.approx(np.ones(ROWS))


class ByMax(Preprocessor):
    """As in Ray's guide: no constructor, `_fit` sets what is learnt."""

    def _fit(self, ds: Any) -> Preprocessor:
        self.stats_ = ds.aggregate(Max("id"))
        return self

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        assert self.stats_ is not None
        return df / self.stats_["max(id)"]


class Doubled(Preprocessor):
    _is_fittable = False

    def __init__(self, column: str) -> None:
        self.column = column

    def _transform_numpy(self, np_data: Any) -> Any:
        return {**np_data, self.column: np_data[self.column] * 2}


class Empty(Preprocessor):
    _is_fittable = False


def test_ones_own_preprocessors_are_those_of_ray() -> None:
    ds = data.range(5)
    with pytest.raises(UsageError, match=r"ByMax: call fit\(ds\) before"):
        ByMax().transform(ds)
    both = of.Chain(ByMax(), Doubled("id"))
    result = both.fit_transform(ds, transform_batch_size=2, transform_num_cpus=1)
    assert column(result, "id").tolist() == [0, 0.5, 1, 1.5, 2]
    assert both.transform_batch({"id": np.array([8.0])})["id"].tolist() == [4]
    assert Doubled("id").transform_batch(pd.DataFrame({"id": [3]}))["id"].tolist() == [6]
    assert column(Doubled("id").transform(ds, batch_size=2, concurrency=4), "id")[-1] == 8
    with pytest.raises(UsageError, match="Empty: expected _transform_pandas or _transform_numpy"):
        Empty().transform_batch({"id": [1]})


def test_missing_values_and_categories() -> None:
    frame = pd.DataFrame(
        {"c": ["b", "a", None, "b"], "n": [1.0, None, 3.0, None], "k": [1, 2, 3, 2]}
    )
    ds = data.from_pandas(frame)
    filled = of.Chain(
        of.SimpleImputer(["n"]),
        of.SimpleImputer(["c"], strategy="most_frequent"),
        of.OrdinalEncoder(["c"]),
        of.Concatenator(["n", "c"], output_column_name="features", dtype=np.float32),
    ).fit(ds)
    rows = filled.transform(ds).take_all()
    assert [row["features"].tolist() for row in rows] == [[1, 1], [2, 0], [3, 1], [2, 1]]
    assert rows[0]["features"].dtype == np.float32
    unfitted = of.Chain(of.SimpleImputer(["c"], "constant", "z"), of.Concatenator(["k", "n"]))
    assert [row["c"] for row in unfitted.transform(ds).take_all()] == ["b", "a", "z", "b"]
    with pytest.raises(UsageError, match=r"OrdinalEncoder: call fit\(ds\) before"):
        of.Chain(of.Concatenator(["k", "n"]), of.OrdinalEncoder(["c"])).transform(ds)
    again = of.Preprocessor.deserialize(filled.serialize())
    batch = {"c": ["a"], "n": [None], "k": [1]}
    assert again.transform_batch(batch)["features"].tolist() == [[2.0, 0.0]]
    hot = of.OneHotEncoder(["k"], max_categories={"k": 2}).fit(ds).transform(ds)
    assert [row["k"].tolist() for row in hot.take_all()] == [[0, 1], [1, 0], [0, 0], [1, 0]]
    labels = of.LabelEncoder("c")
    numbered = labels.fit_transform(data.from_pandas(frame.dropna(subset="c")))
    assert [row["c"] for row in numbered.take_all()] == [1, 0, 1]
    assert [row["c"] for row in labels.inverse_transform(numbered).take_all()] == ["b", "a", "b"]


def test_bins_powers_and_quantiles() -> None:
    frame = pd.DataFrame({"a": [0.2, 1.4, 2.5, 6.2, 9.7, 2.1], "b": [10, 15, 13, 12, 23, 25]})
    ds = data.from_pandas(frame)
    even = of.UniformKBinsDiscretizer(["a", "b"], bins={"a": 4, "b": 3}).fit_transform(ds)
    assert column(even, "a").tolist() == [0, 0, 0, 2, 3, 0]
    assert column(even, "b").tolist() == [0, 0, 0, 0, 2, 2]
    own = of.CustomKBinsDiscretizer(["a"], bins=[0, 1, 4], output_columns=["bin"]).transform(ds)
    assert column(own, "bin") == pytest.approx([0, 1, 1, np.nan, np.nan, 1], nan_ok=True)
    kind = pd.CategoricalDtype(["low", "high"])
    named = of.CustomKBinsDiscretizer(["b"], bins=[0, 14, 99], dtypes={"b": kind}).transform(ds)
    assert [row["b"] for row in named.take(2)] == ["low", "high"]
    robust = of.RobustScaler(["a"]).fit_transform(ds)
    low, middle, high = np.quantile(frame["a"], [0.25, 0.5, 0.75])
    assert column(robust, "a") == pytest.approx((frame["a"] - middle) / (high - low))
    for power in (0.0, 0.5):
        given = data.from_items([{"x": x} for x in (-1.5, 0.0, 2.0)])
        found = column(of.PowerTransformer(["x"], power=power).transform(given), "x")
        assert found == pytest.approx(power_transform_of([-1.5, 0.0, 2.0], power))
    same = of.UniformKBinsDiscretizer(["c"], bins=2).fit_transform(data.from_items([{"c": 5}] * 3))
    assert len(set(column(same, "c"))) == 1


def power_transform_of(values: list[float], power: float) -> list[float]:
    """As Yeo and Johnson write it."""
    above = [
        np.log1p(v) if power == 0 else ((v + 1) ** power - 1) / power for v in values if v >= 0
    ]
    below = [-((1 - v) ** (2 - power) - 1) / (2 - power) for v in values if v < 0]
    return [*below, *above]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, bool])
def test_joined_columns_keep_their_type(dtype: Any) -> None:
    rows = {"a": np.ones(3, dtype), "b": np.zeros((3, 2), dtype)}
    ds = data.from_arrow(pa.table({"a": rows["a"]})).zip(data.from_numpy(rows["b"]))
    joined = of.Concatenator(["data", "a"]).transform(ds).take_batch()["concat_out"]
    assert (joined.dtype, joined.tolist()) == (dtype, [[0, 0, 1]] * 3)


def test_lists_and_texts_become_vectors() -> None:
    frame = pd.DataFrame({"g": [["c", "a"], ["b", "c"], ["d"]], "t": ["x y", "x x z", None]})
    ds = data.from_pandas(frame)
    hot = of.MultiHotEncoder(["g"]).fit_transform(ds)
    assert [row["g"].tolist() for row in hot.take_all()] == [
        [1, 0, 1, 0],
        [0, 1, 1, 0],
        [0, 0, 0, 1],
    ]
    places = of.OrdinalEncoder(["g"]).fit_transform(ds)
    assert [list(row["g"]) for row in places.take_all()] == [[2, 0], [1, 2], [3]]
    pairs = data.from_items([{"p": ["b", "a"]}, {"p": ["a"]}, {"p": ["b", "a"]}])
    whole = of.OrdinalEncoder(["p"], encode_lists=False).fit_transform(pairs)
    assert column(whole, "p").tolist() == [1, 0, 1]
    one = of.OneHotEncoder(["p"]).fit_transform(pairs)
    assert [row["p"].tolist() for row in one.take_all()] == [[0, 1], [1, 0], [0, 1]]
    texts = data.from_items([{"p": "no"}, {"p": "yes"}])
    hot = of.MultiHotEncoder(["p"]).fit_transform(texts)
    assert [row["p"].tolist() for row in hot.take_all()] == [[1, 0], [0, 1]]
    cut = of.Tokenizer(["t"]).transform(ds)
    assert [row["t"] and list(row["t"]) for row in cut.take(2)] == [["x", "y"], ["x", "x", "z"]]
    counts = of.CountVectorizer(["t"], max_features=2).fit_transform(ds)
    assert [row["t"].tolist() for row in counts.take_all()] == [[1, 1], [2, 0], [0, 0]]
    hashed = of.HashingVectorizer(["t"], num_features=3).transform(ds)
    assert [row["t"].sum() for row in hashed.take_all()] == [2, 3, 0]
    likes = data.from_items([{"like": 1, "I": 2}])
    summed = of.FeatureHasher(["like", "I"], num_features=4, output_column="h").transform(likes)
    assert summed.take(1)[0]["h"].sum() == 3
    batch = (
        of.Categorizer(["k"])
        .fit(data.from_items([{"k": "b"}, {"k": "a"}]))
        .transform_batch(pd.DataFrame({"k": ["a", "z"]}))
    )
    assert batch["k"].cat.categories.tolist() == ["a", "b"]


def test_images_are_transformed_one_by_one_or_as_a_batch() -> None:
    images = data.from_items([{"image": np.full((4, 6, 3), n, np.uint8)} for n in range(3)])

    def of_array(image: Any) -> torch.Tensor:
        if not isinstance(image, np.ndarray):
            raise TypeError("an array, as ToTensor")
        return torch.as_tensor(image).permute(2, 0, 1) / 2

    scaled = of.TorchVisionPreprocessor(["image"], of_array, output_columns=["x"]).transform(images)
    batch = scaled.take_batch()
    assert (batch["image"].shape, batch["x"].shape) == ((3, 4, 6, 3), (3, 3, 4, 6))
    assert batch["x"][:, 0, 0, 0].tolist() == [0, 0.5, 1]
    whole = of.TorchVisionPreprocessor(["image"], lambda x: x.sum((1, 2)), batched=True)
    assert whole.transform(images).take_batch()["image"].tolist() == [[0] * 3, [24] * 3, [48] * 3]
    with pytest.raises(UsageError, match="the transform returned a int: expected a tensor"):
        of.TorchVisionPreprocessor(["image"], len).transform(images).take()


def test_wrong_use_names_the_column_and_what_was_expected() -> None:
    ds = data.from_items([{"a": 1, "t": "x"}])
    with pytest.raises(UsageError, match=r"StandardScaler: call fit\(ds\) before"):
        of.StandardScaler(["a"]).transform(ds)
    with pytest.raises(UsageError, match="no column 'b': expected one of a, t"):
        of.MinMaxScaler(["b"]).fit(ds)
    for text in ("no text of it", of.StandardScaler(["a"]).fit(ds).serialize()[:-8]):
        with pytest.raises(UsageError, match=r"deserialize: expected a text of serialize\(\)"):
            of.Preprocessor.deserialize(text)
    with pytest.raises(UsageError, match="column 't' is not of numbers"):
        of.MinMaxScaler(["t"]).fit(ds)
    with pytest.raises(UsageError, match="no column 'a': expected one of t"):
        of.StandardScaler(["a"]).fit(ds).transform(ds.drop_columns("a")).take_all()
    with pytest.raises(UsageError, match="strategy='median': expected one of mean"):
        of.SimpleImputer(["a"], strategy="median")
    with pytest.raises(UsageError, match="columns='a': expected a list"):
        of.StandardScaler("a")
    with pytest.raises(UsageError, match="no column 'b'"):
        of.Concatenator(["a", "b"], raise_if_missing=True).transform(ds).take_all()
