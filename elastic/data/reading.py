"""Functions that create a dataset: `read_...` from files, `from_...` from memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from elastic.data.arguments import NO_EFFECT as PLACEMENT
from elastic.data.arguments import check_others
from elastic.data.batches import arrow, of_rows, pandas, taken_from
from elastic.data.context import FileShuffleConfig
from elastic.data.databases import Lance, Sql
from elastic.data.dataset import Dataset
from elastic.data.datasource.partitioning import Partitioning
from elastic.data.formats import Binary, Csv, Lines, Numpy
from elastic.data.nodes import Apply, Read
from elastic.data.operations import Decode, Fetch
from elastic.data.parquet import Parquet
from elastic.data.sources import HuggingFace, Memory, Range, Source
from elastic.data.webdataset import Tar, coders_of, decoded
from elastic.errors import UsageError
from elastic.storage.filesystems import as_fsspec

NO_EFFECT = PLACEMENT | {
    "meta_provider",
    "ignore_missing_paths",
}
"""Ray's arguments for placement and metadata: accepted without effect."""
IMAGES = ("png", "jpg", "jpeg", "tif", "tiff", "bmp", "gif", "webp")


def _of(source: Source) -> Dataset:
    return Dataset(Read((), source))


def _files(
    what: str,
    paths: Any,
    ends: Sequence[str] | None,
    others: dict[str, Any],
    partitioning: str | None = None,
) -> Any:
    """Return the common arguments of all sources of files; `partitioning` is the default."""
    folders = others.pop("partitioning", partitioning)
    if folders == "hive":
        folders = Partitioning("hive")
    if not (folders is None or isinstance(folders, Partitioning)):
        raise UsageError(
            f"elastic.data.{what}: partitioning={folders!r}: expected 'hive' (folders like "
            f"year=2024 are columns), None, or a Partitioning of elastic.data.datasource"
        )
    shuffle = others.pop("shuffle", None)
    if not (shuffle in (None, "files") or isinstance(shuffle, FileShuffleConfig)):
        raise UsageError(
            f"elastic.data.{what}: shuffle={shuffle!r}: expected 'files', or a FileShuffleConfig; "
            f"rows are shuffled by ds.random_shuffle(seed=...)"
        )
    options, filesystem = others.pop("storage_options", None), others.pop("filesystem", None)
    stream = others.pop("arrow_open_stream_args", None) or {}
    if filesystem is not None:
        paths, options = _in_filesystem(paths, filesystem)
    found: dict[str, Any] = {
        "name": what,
        "paths": paths,
        "extensions": None if ends is None else tuple(ends),
        "options": options,
        "on_error": others.pop("on_error", "raise"),
        "partitioning": folders,
        "with_paths": bool(others.pop("include_paths", False)),
        "compression": stream.get("compression"),
        "shuffle": FileShuffleConfig() if shuffle == "files" else shuffle,
    }
    unknown = sorted(set(others) - NO_EFFECT)
    if unknown:
        raise UsageError(
            f"elastic.data.{what}: unknown arguments: {', '.join(unknown)}; of the file system "
            f"are storage_options={{...}}, as fsspec has them"
        )
    return found


def _in_filesystem(paths: Any, filesystem: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the URLs of paths in a file system of fsspec or pyarrow, and its options."""
    several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    urls, options = [], {}
    for one in several:
        found, inside = as_fsspec(filesystem, os.fspath(one))
        urls.append(found.unstrip_protocol(inside))
        options = dict(found.storage_options)
    return urls, options


def read_parquet(
    paths: Any,
    *,
    columns: Sequence[str] | None = None,
    schema: Any = None,
    filter: Any = None,  # noqa: A002
    tensor_column_schema: Mapping[str, tuple[Any, Sequence[int]]] | None = None,
    file_extensions: Sequence[str] | None = ("parquet",),
    **others: Any,
) -> Dataset:
    """Read parquet files, with random access by row group.

    Args:
        paths: an fsspec path of a file or folder, a pattern, or several of these.
        columns: those to read, None for all.
        schema: of pyarrow: the columns to read, and the types to which they are cast.
        filter: an expression, as `Dataset.filter` takes it; also of columns that are not read.
        tensor_column_schema: the dtype and shape of columns that hold arrays as raw bytes.
        file_extensions: of the files in a folder.
        others: storage_options, a dict for the file system; or filesystem, of fsspec or pyarrow,
            that the paths are in; on_error, "skip" to leave out files whose footers are broken or
            have another schema; partitioning, by default "hive": folders like "year=2024" are
            columns of texts, None: they are not; or a `Partitioning`; shuffle, "files" or
            FileShuffleConfig(seed=1): a random order of the files, in training another one in each
            epoch; include_paths, True for a column "path" of the files' paths; Ray's placement
            arguments, without effect.
    """
    files = _files("read_parquet", paths, file_extensions, others, "hive")
    names = schema.names if columns is None and schema is not None else columns
    chosen = None if names is None or filter is not None else tuple(names)
    ds = _of(Parquet(**files, columns=chosen, schema=schema))
    if filter is not None:
        ds = ds.filter(expr=filter)
        ds = ds if names is None else ds.select_columns(names)
    return ds if not tensor_column_schema else ds.map_batches(_of_bytes(tensor_column_schema))


def _of_bytes(kinds: Mapping[str, tuple[Any, Sequence[int]]]) -> Callable[[Any], Any]:
    """Return a function of batches that makes arrays of the bytes in some columns."""

    def tensors(batch: dict[str, Any]) -> dict[str, Any]:
        for name, (dtype, shape) in kinds.items():
            rows = np.frombuffer(b"".join(batch[name]), dtype)
            batch[name] = rows.reshape(len(batch[name]), *shape)
        return batch

    return tensors


def read_csv(
    paths: Any,
    *,
    file_extensions: Sequence[str] | None = None,
    read_options: Any = None,
    parse_options: Any = None,
    convert_options: Any = None,
    **others: Any,
) -> Dataset:
    """Read CSV files, including compressed ones.

    Args:
        paths: as in `read_parquet`.
        file_extensions: of the files in a folder, None for all.
        read_options: of pyarrow.csv.
        parse_options: of pyarrow.csv.
        convert_options: of pyarrow.csv.
        others: as in `read_parquet`; on_error="skip" leaves out rows with a wrong number of
            columns or a value of another type, and the rest of a file after an error;
            arrow_open_stream_args, such as {"compression": "gzip"} of files whose names do not end
            with that.
    """
    options = {
        "read_options": read_options,
        "parse_options": parse_options,
        "convert_options": convert_options,
    }
    return _of(
        Csv(**_files("read_csv", paths, file_extensions, others, "hive"), arrow_options=options)
    )


def read_json(
    paths: Any, *, lines: bool | None = None, file_extensions: Any = None, **others: Any
) -> Dataset:
    """Read files with a JSON object in each line, or with one list of objects.

    Args:
        paths: as in `read_parquet`.
        lines: Ray's, without effect: the format is detected.
        file_extensions: of the files in a folder, None for all.
        others: as in `read_parquet`; on_error="skip" leaves out invalid lines.
    """
    del lines
    return _of(Lines(**_files("read_json", paths, file_extensions, others, "hive"), is_json=True))


def read_text(
    paths: Any,
    *,
    encoding: str = "utf-8",
    drop_empty_lines: bool = True,
    file_extensions: Any = None,
    **others: Any,
) -> Dataset:
    """Read the lines of files, as column "text"; arguments as in `read_parquet`."""
    files = _files("read_text", paths, file_extensions, others)
    return _of(Lines(**files, drop_empty=drop_empty_lines, encoding=encoding))


def read_numpy(
    paths: Any, *, file_extensions: Any = ("npy",), allow_pickle: bool = False, **others: Any
) -> Dataset:
    """Read .npy files, as column "data": a row for each entry of the first axis."""
    if allow_pickle:
        raise UsageError("read_numpy: allow_pickle=True runs code of the file; expected False")
    return _of(Numpy(**_files("read_numpy", paths, file_extensions, others)))


def read_binary_files(
    paths: Any, *, include_paths: bool = False, file_extensions: Any = None, **others: Any
) -> Dataset:
    """Read whole files: a row for each, with "bytes", and optionally "path"."""
    given = {**others, "include_paths": include_paths}
    return _of(Binary(**_files("read_binary_files", paths, file_extensions, given)))


def read_images(
    paths: Any,
    *,
    size: tuple[int, int] | None = None,
    mode: str | None = None,
    include_paths: bool = False,
    file_extensions: Any = IMAGES,
    **others: Any,
) -> Dataset:
    """Read images, as arrays of uint8 in column "image"; they are decoded when rows are read.

    Args:
        paths: as in `read_parquet`.
        size: (height, width) to resize to; images of one size become one array in a batch.
        mode: of Pillow, such as "RGB"; None for no change.
        include_paths: add a column "path".
        file_extensions: of the files in a folder.
        others: as in `read_parquet`; on_error="skip" leaves out images that cannot be decoded, for
            which all are decoded once when they are listed.

    Raises:
        UsageError: Pillow is missing.
    """
    try:
        import PIL.Image as _  # noqa: F401
    except ImportError as error:
        raise UsageError("read_images decodes with Pillow: pip install pillow") from error
    images = Decode(size, mode, drops_path=not include_paths)
    files = _files("read_images", paths, file_extensions, {**others, "include_paths": True})
    source = Binary(**files, decode=images.decode)
    return Dataset(Apply((Read((), source),), images))


def read_webdataset(
    paths: Any,
    *,
    decoder: Any = True,
    fileselect: Any = None,
    filerename: Any = None,
    suffixes: Any = None,
    include_paths: bool = False,
    file_extensions: Any = ("tar", "tar.gz", "tgz"),
    **others: Any,
) -> Dataset:
    """Read tar files of samples: a row for each, with "__key__" and a column for each ending.

    Args:
        paths: as in `read_parquet`.
        decoder: of samples, when rows are read: True by the endings of columns (text, numbers,
            JSON, images, arrays, tensors); "PIL" for images of Pillow; None for bytes; a function
            that takes and returns a dict; or several of these.
        fileselect: members to read, by patterns, or a function of their names.
        filerename: a function that renames members first, or several.
        suffixes: endings to read, by names, patterns or a function. By default those of the first
            sample are the columns, and a sample with another one is an error.
        include_paths: add a column "path".
        file_extensions: of the files in a folder.
        others: as in `read_parquet`; on_error="skip" leaves out the rest of a file after an error.
    """
    others.pop("verbose_open", None)
    renames = filerename if isinstance(filerename, (list, tuple)) else [filerename]
    ds = _of(
        Tar(
            **_files(
                "read_webdataset",
                paths,
                file_extensions,
                {**others, "include_paths": include_paths},
            ),
            fileselect=[fileselect] if isinstance(fileselect, str) else fileselect,
            filerename=[one for one in renames if one is not None],
            suffixes=[suffixes] if isinstance(suffixes, str) else suffixes,
        )
    )
    for decode in coders_of(decoder, decoded):
        ds = ds.map(decode)
    return ds


def read_lance(
    uri: str | Sequence[str],
    *,
    version: int | str | None = None,
    columns: Sequence[str] | None = None,
    filter: str | None = None,  # noqa: A002
    storage_options: dict[str, Any] | None = None,
    **others: Any,
) -> Dataset:
    """Read a Lance table, or several, with random access; needs pylance.

    Args:
        uri: of the table.
        version: a number or a tag; None for the newest version.
        columns: those to read, None for all.
        filter: SQL of a condition on rows; without random access.
        storage_options: of Lance.
        others: Ray's placement arguments, without effect here.
    """
    check_others("read_lance", others)
    names = None if columns is None else tuple(columns)
    first, *more = (
        _of(Lance("read_lance", str(one), version, names, filter, storage_options))
        for one in ([uri] if isinstance(uri, (str, os.PathLike)) else uri)
    )
    return first.union(*more) if more else first


def read_sql(
    sql: str, connection_factory: Callable[[], Any], *, sql_params: Any = None, **others: Any
) -> Dataset:
    """Read the rows of a query, in the order in which the database returns them.

        data.read_sql("SELECT * FROM movie", lambda: sqlite3.connect("movies.db"))

    Args:
        sql: the query.
        connection_factory: returns a connection as PEP 249 has them, of sqlite3, DuckDB, ....
        sql_params: of the query.
        others: Ray's placement arguments and shards, without effect here.
    """
    check_others("read_sql", others, "shard_keys", "shard_hash_fn")
    return _of(Sql("read_sql", sql, connection_factory, sql_params))


# ------------------------------------------------------------------------------ in memory


def range(n: int, **others: Any) -> Dataset:  # noqa: A001
    """Return a dataset of the numbers 0 to n - 1, as column "id"."""
    check_others("range", others)
    return _of(Range("range", count=n))


def range_tensor(n: int, *, shape: Sequence[int] = (1,), **others: Any) -> Dataset:
    """Return n arrays of a shape, as column "data", each filled with its number."""
    check_others("range_tensor", others)

    def filled(batch: dict[str, Any]) -> dict[str, Any]:
        ids = batch["id"].reshape(-1, *(1 for _ in shape))
        return {"data": np.broadcast_to(ids, (len(ids), *shape))}

    return range(n).map_batches(filled)


def from_items(items: Sequence[Any], **others: Any) -> Dataset:
    """Return a dataset of dicts; other values become the column "item"."""
    check_others("from_items", others)
    rows = [one if isinstance(one, Mapping) else {"item": one} for one in items]
    return _of(Memory("from_items", batches=[of_rows(rows)] if rows else []))


def from_pandas(dfs: Any, **others: Any) -> Dataset:
    """Return the rows of a DataFrame, or of several, without their index."""
    check_others("from_pandas", others)
    pandas()
    several = dfs if isinstance(dfs, (list, tuple)) else [dfs]
    tables = [arrow().Table.from_pandas(one, preserve_index=False) for one in several]
    return _of(Memory("from_pandas", batches=tables))


def from_arrow(tables: Any, **others: Any) -> Dataset:
    """Return the rows of a pyarrow table, or of several."""
    check_others("from_arrow", others)
    several = tables if isinstance(tables, (list, tuple)) else [tables]
    batches = [taken_from(one, "from_arrow") for one in several]
    return _of(Memory("from_arrow", batches=batches))


def from_numpy(ndarrays: Any) -> Dataset:
    """Return a row for each entry of an array's first axis, as column "data"."""
    several = ndarrays if isinstance(ndarrays, (list, tuple)) else [ndarrays]
    return _of(Memory("from_numpy", batches=[{"data": np.asarray(one)} for one in several]))


def from_polars(frames: Any) -> Dataset:
    """Return the rows of a Polars DataFrame, or of several."""
    several = frames if isinstance(frames, (list, tuple)) else [frames]
    return from_arrow([one.to_arrow() for one in several])


def from_duckdb(relation: Any) -> Dataset:
    """Return the rows of a DuckDB relation, computed and held in memory; see `read_sql`."""
    return _of(Memory("from_duckdb", batches=[arrow().table(relation)]))


def from_torch(dataset: Any, **others: Any) -> Dataset:
    """Return the samples of a torch dataset, as column "item".

    One with `__getitem__` and `__len__` is pickled to the workers, and read when rows are. An
    iterable one is read at once.
    """
    check_others("from_torch", others, "local_read")
    import torch

    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)  # It has __getitem__, too.
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_iterable:
        numbers = Range("from_torch", count=len(dataset))
        return Dataset(Apply((Read((), numbers),), Fetch(dataset)))
    return from_items(list(dataset))


def from_huggingface(dataset: Any, **others: Any) -> Dataset:
    """Return the rows of a Hugging Face dataset, map-style or iterable.

    Raises:
        UsageError: it is a dict of several datasets.
    """
    check_others("from_huggingface", others)
    if isinstance(dataset, Mapping):
        raise UsageError(
            f"from_huggingface: got a {type(dataset).__name__} of {', '.join(dataset)}: pass one "
            f"of them, such as dataset['train']"
        )
    return _of(HuggingFace("from_huggingface", dataset=dataset))


def from_dask(df: Any) -> Dataset:
    """Return the rows of a Dask DataFrame, computed and held in memory."""
    return from_pandas(df.compute())


def from_daft(df: Any) -> Dataset:
    """Return the rows of a Daft DataFrame, computed and held in memory."""
    return from_arrow(df.to_arrow())


def from_spark(df: Any, **others: Any) -> Dataset:
    """Return the rows of a DataFrame of Spark 4, computed and held in memory.

    A table that is larger is written by Spark: `read_parquet(path)`.
    """
    return from_arrow(df.toArrow(), **others)


def from_ray(ds: Any) -> Dataset:
    """Return the rows of a dataset of Ray Data, computed and held in memory."""
    return from_arrow(list(ds.iter_batches(batch_size=None, batch_format="pyarrow")))
