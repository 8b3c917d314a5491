"""Operations that need all rows are left to existing engines: sort, groupby, join, distinct rows.

    ds.sort("age")  # By Arrow, in memory.
    ds.using("dask").sort("age")
    ds.using("dask", address="tcp://head:8786", path="s3://bucket/sorted").join(other, on="id")

Rule: rows are exchanged with the engine as parquet files, in a folder that the user names, or in a
temporary one of this machine.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic

from elastic.data.batches import names_of
from elastic.data.datasource.partitioning import Partitioning
from elastic.data.gathering import D, InMemory
from elastic.data.nodes import Read
from elastic.data.parquet import Parquet
from elastic.errors import UsageError

AGGREGATES = ("count", "sum", "mean", "min", "max", "std")
PARTITION_BYTES = 64 * 1024**2


def engine_of(name: str, dataset: D, options: Mapping[str, Any]) -> Engine[D] | InMemory[D]:
    """Return an engine for a dataset.

    Raises:
        UsageError: there is no such engine, its package is missing, or an option is unknown.
    """
    known = {"arrow": ["memory"], "dask": ["address", "path"]}
    if name not in known:
        raise UsageError(f"Dataset.using({name!r}): expected 'arrow' or 'dask'")
    unknown = sorted(set(options) - set(known[name]))
    if unknown:
        raise UsageError(
            f"Dataset.using({name!r}): {', '.join(unknown)}: expected {', '.join(known[name])}"
        )
    if name == "arrow":
        return InMemory(dataset, **options)
    try:
        import dask.dataframe as _  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Dataset.using('dask'): {error}: pip install 'elastic-torch[dask]'"
        ) from error
    return Engine(dataset, options.get("address"), options.get("path"))


class Engine(Generic[D]):
    """Operations on a dataset by Dask: each computes at once, and returns a dataset of files."""

    def __init__(self, dataset: D, address: str | None, path: Any) -> None:
        """Compute nothing yet.

        Args:
            dataset: the rows.
            address: of a Dask scheduler; None for this machine's cores.
            path: folder for the result, which all workers of that cluster can write.
        """
        self._dataset = dataset
        self._address = address
        self._path = path

    def sort(self, key: str | Sequence[str], descending: bool = False) -> D:
        """Return the rows sorted by columns."""
        return self._computed(
            lambda frame: frame.sort_values(names_of(key), ascending=not descending)
        )

    def groupby(self, key: str | Sequence[str]) -> Groups[D]:
        """Return groups of rows with equal values, for aggregation."""
        return Groups(self, names_of(key))

    def join(
        self,
        ds: D,
        join_type: str = "inner",
        num_partitions: int | None = None,
        on: str | Sequence[str] = ("id",),
        right_on: str | Sequence[str] | None = None,
        left_suffix: str | None = None,
        right_suffix: str | None = None,
    ) -> D:
        """Return rows of both datasets with equal keys, as `Dataset.join`; not semi, not anti."""
        del num_partitions
        hows = {"inner": "inner", "full_outer": "outer", "left_outer": "left"}
        hows["right_outer"] = "right"
        if join_type not in hows:
            raise UsageError(
                f"Dataset.using('dask').join: join_type={join_type!r}: expected one of "
                f"{', '.join(hows)}"
            )
        return self._computed(
            lambda left, right: left.merge(
                right,
                left_on=names_of(on),
                right_on=names_of(on if right_on is None else right_on),
                how=hows[join_type],
                suffixes=(left_suffix or "", "_1" if right_suffix is None else right_suffix),
            ),
            ds,
        )

    def drop_duplicates(self, on: str | Sequence[str] | None = None) -> D:
        """Keep the first of rows with equal values in these columns, None for all columns."""
        return self._computed(lambda frame: frame.drop_duplicates(subset=on and names_of(on)))

    def unique(self, column: str) -> list[Any]:
        """Return the distinct values of a column."""
        found = Engine(self._dataset.select_columns([column]), self._address, None)
        return [row[column] for row in found.drop_duplicates().take_all()]

    def repartition(self, num_blocks: int) -> D:
        """Return the rows in this many files."""
        return self._computed(lambda frame: frame.repartition(npartitions=num_blocks))

    def _computed(self, work: Any, *others: D) -> D:
        import dask.dataframe as frames

        target = str(self._path) if self._path is not None else tempfile.mkdtemp("-elastic-dask")
        with self._cluster(), contextlib.ExitStack() as folders:
            given = [
                frames.read_parquet(self._files(one, folders), blocksize=PARTITION_BYTES)
                for one in (self._dataset, *others)
            ]
            work(*given).to_parquet(
                target, write_index=False, name_function=lambda number: f"part-{number:06d}.parquet"
            )
        return self._dataset.over(Read((), _written_to(target)))

    def _files(self, dataset: D, folders: contextlib.ExitStack) -> list[str]:
        """Return parquet files with the rows: the source's own, or newly written ones."""
        node = dataset.node
        if isinstance(node, Read) and isinstance(node.source, Parquet) and not node.source.columns:
            return dataset.input_files()
        near = (
            None
            if self._path is None or "://" in str(self._path)
            else os.path.dirname(os.path.abspath(str(self._path)))
        )
        folder = folders.enter_context(tempfile.TemporaryDirectory("-elastic-dask", dir=near))
        dataset.write_parquet(folder)
        return [file.path for file in _written_to(folder).files()]

    @contextlib.contextmanager
    def _cluster(self) -> Iterator[None]:
        if self._address is None:
            yield
            return
        from distributed import Client

        with Client(self._address):
            yield


class Groups(Generic[D]):
    """Grouped rows; `count`, `sum`, `mean`, `min`, `max` and `std` return a dataset."""

    def __init__(self, engine: Engine[D], keys: list[str]) -> None:
        self._engine, self._keys = engine, keys

    def __getattr__(self, name: str) -> Any:
        """Return an aggregate, which is called with a column or several."""
        if name not in AGGREGATES:
            raise AttributeError(f"groupby(...) has {', '.join(AGGREGATES)}, and no {name!r}")
        return lambda on=None: self._summed(name, on)

    def _summed(self, name: str, on: str | Sequence[str] | None) -> D:
        keys = self._keys

        def work(frame: Any) -> Any:
            groups = frame.groupby(keys)
            if name == "count" and on is None:
                return groups.size().to_frame("count()").reset_index()
            columns = (
                names_of(on) if on is not None else [c for c in frame.columns if c not in keys]
            )
            found = getattr(groups[columns], name)()
            return found.rename(columns={one: f"{name}({one})" for one in columns}).reset_index()

        return self._engine._computed(work)


def _written_to(folder: str) -> Parquet:
    return Parquet("read_parquet", folder, ("parquet",), partitioning=Partitioning("hive"))
