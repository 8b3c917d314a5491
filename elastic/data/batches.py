"""Batches of rows between operations, and their conversion between formats.

A batch is a pyarrow table, or a dict of NumPy arrays of equal length. Rule: it is converted to the
other form only when an operation needs that one, and rows keep their order.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elastic.errors import UsageError

Batch = Any
"""A pyarrow.Table, or a dict of NumPy arrays."""
NUMERIC = "biufcmM"
"""Kinds of NumPy's types whose rows are stacked to one array."""
HOLDERS = frozenset({dict, list, np.ndarray})
"""Types of values that can be written to."""
FORMATS = ("default", "numpy", "pandas", "pyarrow")
EXTRA = "pip install 'elastic-torch[data]'"


def arrow() -> Any:
    """Return the module pyarrow; UsageError if it is not installed."""
    return _needed("pyarrow", "elastic.data reads with pyarrow")


def pandas() -> Any:
    """Return the module pandas; UsageError if it is not installed."""
    return _needed("pandas", "this needs pandas")


def _needed(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{what}, which is missing: {EXTRA}") from error


def num_rows(batch: Batch) -> int:
    if isinstance(batch, dict):
        return len(next(iter(batch.values()))) if batch else 0
    return int(batch.num_rows)


def columns_of(batch: Batch) -> list[str]:
    return list(batch) if isinstance(batch, dict) else list(batch.column_names)


def names_of(given: str | Sequence[str]) -> list[str]:
    """Return the names of columns, given as one or several."""
    return [given] if isinstance(given, str) else list(given)


def check_columns(names: Iterable[str], known: Iterable[str], what: str) -> None:
    known = list(known)
    missing = [name for name in names if name not in known]
    if missing:
        raise UsageError(f"{what}: there is no column {missing[0]!r}; expected some of {known}")


def sliced(batch: Batch, start: int, stop: int) -> Batch:
    """Return the rows from `start` to `stop`, without a copy.

    Nobody can write to them: the batch may be the only one, which is read again.
    """
    if not isinstance(batch, dict):
        return batch.slice(start, stop - start)
    found = {name: values[start:stop] for name, values in batch.items()}
    for values in found.values():
        values.flags.writeable = False
    return found


def writable(values: Any) -> Any:
    """Return an array that a function may write to, and to the arrays and lists in it."""
    if values.flags.writeable:
        return values
    holds = values.dtype == object and not HOLDERS.isdisjoint(map(type, values.ravel()))
    return copy.deepcopy(values) if holds else values.copy()


def taken(batch: Batch, rows: Any) -> Batch:
    """Return rows by their numbers, in the given order."""
    if isinstance(batch, dict):
        return {name: values[rows] for name, values in batch.items()}
    pa = arrow()
    numbers = pa.py_buffer(np.ascontiguousarray(rows, np.int64))
    # `pa.array` would import pandas, for 0.4 s of each process.
    return batch.take(pa.Array.from_buffers(pa.int64(), len(rows), [None, numbers]))


def joined(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches, and let what a batch has no column for be missing.

    Mixed forms become a table, in which missing numbers change no others; a dict, if one cannot.
    """
    if len(batches) <= 1:
        return batches[0] if batches else {}
    if len({isinstance(one, dict) for one in batches}) > 1:
        with contextlib.suppress(UsageError):
            batches = [to_table(one) for one in batches]
    if all(not isinstance(one, dict) for one in batches):
        pa = arrow()
        # Arrays of one shape in a batch, and of several in another, have no common type.
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowTypeError):
            return pa.concat_tables(batches, promote_options="permissive")
    parts = [to_numpy(one) for one in batches]
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: _stacked([part[name] if name in part else _missing(part) for part in parts])
        for name in names
    }


def _missing(batch: Batch) -> Any:
    return _objects([None] * num_rows(batch))


def _stacked(arrays: Sequence[Any]) -> Any:
    if len({(one.dtype == object, one.shape[1:]) for one in arrays}) == 1:
        return np.concatenate(arrays)
    return _objects([value for one in arrays for value in one])


def alike(one: Batch, other: Batch) -> tuple[Batch, Batch]:
    """Return two batches in one form: tables, unless both are dicts or Arrow cannot store one."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        with contextlib.suppress(UsageError):
            return to_table(one), to_table(other)
    return to_numpy(one), to_numpy(other)


def check_size(size: Any, what: str, name: str = "batch_size") -> int | None:
    """Return a number of rows, or None; UsageError if the argument of this name is neither."""
    if size is None:
        return None
    is_number = hasattr(size, "__index__") and not isinstance(size, bool)  # NumPy's, too.
    if is_number and operator.index(size) > 0:
        return operator.index(size)
    raise UsageError(f"{what}: {name}={size!r}: expected an int from 1 on, or None")


def batched(batches: Iterable[Batch], size: int | None) -> Iterator[Batch]:
    """Yield the same rows in batches of a size, the last one smaller; None for no change."""
    held: list[Batch] = []
    count = 0
    for batch in batches:
        rows, start = num_rows(batch), 0
        if not rows:
            continue
        if size is None:
            yield batch
            continue
        while count + rows - start >= size:
            stop = start + size - count
            held.append(sliced(batch, start, stop))
            yield joined(held)
            held, count, start = [], 0, stop
        if start < rows:
            held.append(sliced(batch, start, rows))
            count += rows - start
    if held:
        yield joined(held)


# --------------------------------------------------------------------------------- forms


def to_format(batch: Batch, name: str) -> Any:
    """Return a batch as "numpy" (and "default"), "pandas" or "pyarrow"."""
    if name == "pyarrow":
        return to_table(batch)
    if name == "pandas":
        return to_pandas(batch)
    return to_numpy(batch)


def check_format(name: str | None, what: str) -> str:
    """Return the name of a format, if valid; None is "default"."""
    name = name or "default"
    if name not in FORMATS:
        raise UsageError(f"{what}: batch_format={name!r}: expected one of {', '.join(FORMATS)}")
    return name


def to_numpy(batch: Batch) -> dict[str, Any]:
    """Return a dict of arrays; lists of equal length become rows of one array."""
    if isinstance(batch, dict):
        return batch
    return {name: _column(batch.column(name)) for name in batch.column_names}


def _column(column: Any) -> Any:
    pa = arrow()
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        if column.null_count:
            return _objects([one.to_numpy() if one.is_valid else None for one in column])
        parts = [_tensors(chunk) for chunk in column.chunks if len(chunk)]
        empty = np.empty((0, *kind.shape), kind.value_type.to_pandas_dtype())
        return np.concatenate(parts) if parts else empty
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        return _objects(column.to_pylist())
    if not _is_list(kind):
        return _flat(column)
    values = column.combine_chunks()
    is_flat = pa.types.is_primitive(kind.value_type) and not values.null_count
    if is_flat and len(values):
        flat = values.flatten()
        lengths = _flat(values.value_lengths())
        if (lengths == lengths[0]).all() and not flat.null_count:
            return _flat(flat).reshape(len(values), int(lengths[0]))
    return array_of(_of_lists(values))


def _flat(column: Any) -> Any:
    """Return the values of a column without lists."""
    types = arrow().types
    chunks = getattr(column, "chunks", [column])
    is_number = types.is_integer(column.type) or types.is_floating(column.type)
    if not is_number or column.null_count or not chunks:
        return column.to_numpy(zero_copy_only=False)
    # The same arrays as `to_numpy` returns, which would import pandas, for 0.4 s of each process.
    found = [np.from_dlpack(one) for one in chunks]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _tensors(chunk: Any) -> Any:
    kind = chunk.type
    if not arrow().types.is_boolean(kind.value_type):
        return chunk.to_numpy_ndarray()
    # Arrow has no tensors of these.
    flat = chunk.storage.flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(chunk), *kind.shape)


def _is_list(kind: Any) -> bool:
    types = arrow().types
    return any((types.is_list(kind), types.is_large_list(kind), types.is_fixed_size_list(kind)))


def _of_lists(values: Any) -> list[Any]:
    """Return an array for each list; a list of lists of different lengths stays one."""
    leaves, levels = values, []
    while _is_list(leaves.type):
        levels.append(leaves)
        leaves = leaves.flatten()
    inner = [*levels[1:], leaves]
    if not arrow().types.is_primitive(leaves.type) or any(one.null_count for one in inner):
        return [_array_or_list(one) for one in values.to_pylist()]
    flat = np.array(leaves.to_numpy(zero_copy_only=False))  # Which functions may write to.
    lengths = [_lengths_in(one) for one in levels]
    ends = [np.concatenate([[0], np.cumsum(one)]) for one in lengths]
    found: list[Any] = []
    for row, is_valid in enumerate(values.is_valid().to_pylist()):
        start, stop, shape = row, row + 1, []
        for some, bounds in zip(lengths, ends, strict=True):
            sizes = some[start:stop]
            shape.append(int(sizes[0]) if len(sizes) and (sizes == sizes[0]).all() else -len(sizes))
            start, stop = bounds[start], bounds[stop]
        if not is_valid:
            found.append(None)
        elif min(shape) < 0:
            found.append(values[row].as_py())
        else:
            found.append(flat[start:stop].reshape(shape))
    return found


def _lengths_in(lists: Any) -> Any:
    compute = importlib.import_module("pyarrow.compute")
    return compute.fill_null(compute.list_value_length(lists), 0).to_numpy(zero_copy_only=False)


def _array_or_list(value: Any) -> Any:
    try:
        return None if value is None else np.asarray(value)
    except ValueError:  # Of lists of different lengths.
        return value


def array_of(values: Sequence[Any]) -> Any:
    """Return an array with one entry for each value: numeric if possible, otherwise of objects."""
    first = values[0] if len(values) else None
    if _is_tensor(first):
        values = [one.detach().cpu().numpy() for one in values]
    if len(values) and all(isinstance(one, (np.ndarray, list, tuple)) for one in values):
        arrays = [np.asarray(one) for one in values] if _is_even(values) else []
        kinds = {(one.shape, one.dtype.kind in NUMERIC) for one in arrays}
        if len(kinds) == 1 and kinds.pop()[1]:
            return np.stack(arrays)
        return _objects(values)
    if all(isinstance(one, (bool, int, float, np.number, np.bool_)) for one in values):
        return np.asarray(values)
    return _objects(values)


def _is_even(values: Sequence[Any]) -> bool:
    """Return whether nested lists have equal lengths, so that NumPy can stack them."""
    return len({_lengths(one) for one in values}) == 1 and _lengths(values[0]) is not None


def _lengths(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, np.ndarray):
        return value.shape
    if not isinstance(value, (list, tuple)):
        return ()
    inner = {_lengths(one) for one in value}
    if len(inner) > 1 or None in inner:
        return None
    return (len(value), *(inner.pop() or () if inner else ()))


def _objects(values: Sequence[Any]) -> Any:
    found = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        found[index] = value
    return found


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def to_table(batch: Batch) -> Any:
    """Return a pyarrow table; UsageError if a column holds values that Arrow cannot store."""
    pa = arrow()
    if not isinstance(batch, dict):
        return batch
    columns: dict[str, Any] = {}
    for name, values in batch.items():
        try:
            if values.ndim > 1 and values.dtype != object and values.size:
                whole = np.ascontiguousarray(values)
                columns[name] = pa.FixedShapeTensorArray.from_numpy_ndarray(whole)
            elif _are_ragged(values):
                columns[name] = _nested(values)
            else:
                columns[name] = _plain_array(values)
        except (pa.ArrowException, OverflowError) as error:
            kind = type(values[0]).__name__ if len(values) else "nothing"
            raise UsageError(
                f"elastic.data: column {name!r} holds {kind} values that Arrow cannot store "
                f"({error}): turn them into numbers, text, bytes or arrays of one shape"
            ) from error
    return pa.table(columns)


def _plain_array(values: Any) -> Any:
    pa = arrow()
    if values.dtype != object and values.ndim == 1:
        return pa.array(values, from_pandas=True)
    plain = values.tolist()
    try:
        found = pa.array(plain, from_pandas=True)
    except OverflowError:
        return pa.array(plain, pa.uint64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        if not any(isinstance(one, np.ndarray) for one in plain):
            raise
        # Among lists of lists some may be arrays, and an empty one has numbers for Arrow.
        lists = [one.tolist() if isinstance(one, np.ndarray) else one for one in plain]
        return pa.array(lists, from_pandas=True)
    if pa.types.is_temporal(found.type) and any(map(_nanoseconds, plain)):
        return pa.array(pandas().Series(plain))  # From a list Arrow takes microseconds.
    return found


def _nanoseconds(value: Any) -> int:
    """Return the nanoseconds of a time or a difference of pandas, 0 of others."""
    return getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0)


def _are_ragged(values: Any) -> bool:
    """Return whether a column holds numbers in arrays of two dimensions or more."""
    arrays = [one for one in values if one is not None]
    return len({one.ndim for one in arrays if isinstance(one, np.ndarray)} - {0, 1}) == 1 and all(
        isinstance(one, np.ndarray) and one.ndim == arrays[0].ndim and one.dtype.kind in NUMERIC
        for one in arrays
    )


def _nested(values: Any) -> Any:
    """Return arrays of several shapes as lists of lists, those of a common length as fixed ones."""
    pa = arrow()
    arrays = [one for one in values if one is not None]
    column = pa.array(np.concatenate([one.reshape(-1) for one in arrays]))
    for axis in reversed(range(1, arrays[0].ndim)):
        sizes = {one.shape[axis] for one in arrays}
        if len(sizes) == 1 and 0 not in sizes:
            column = pa.FixedSizeListArray.from_arrays(column, sizes.pop())
            continue
        lengths = [np.full(int(np.prod(one.shape[:axis])), one.shape[axis]) for one in arrays]
        column = _of_lengths(np.concatenate(lengths), column, None)
    rows = np.asarray([0 if one is None else len(one) for one in values])
    return _of_lengths(rows, column, pa.array([one is None for one in values]))


def _of_lengths(lengths: Any, values: Any, mask: Any) -> Any:
    pa = arrow()
    ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    return pa.ListArray.from_arrays(ends, values, mask=mask)


def to_pandas(batch: Batch) -> Any:
    """Return a DataFrame; a column with several numbers per row becomes one of arrays."""
    frames = pandas()
    if not isinstance(batch, dict):
        return frames.DataFrame(
            {
                name: (
                    list(_column(batch.column(name)))
                    if arrow().types.is_nested(batch.schema.field(name).type)
                    or isinstance(batch.schema.field(name).type, arrow().BaseExtensionType)
                    else batch.column(name).to_pandas()
                )
                for name in batch.column_names
            }
        )
    return frames.DataFrame(
        {name: list(values) if values.ndim > 1 else values for name, values in batch.items()}
    )


def taken_from(value: Any, what: str) -> Batch:
    """Return the result of a user's function as a batch.

    Raises:
        UsageError: it is not a batch, or its columns differ in length.
    """
    pa = arrow()
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    if isinstance(value, pa.Table):
        return value
    if type(value).__name__ == "DataFrame" and type(value).__module__.startswith("pandas"):
        return {str(name): _of_series(value[name]) for name in value.columns}
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{what} returned a {type(value).__name__}: expected a dict of arrays or lists, a "
            f"pandas.DataFrame or a pyarrow.Table"
        )
    found = {}
    for name, values in value.items():
        if _is_tensor(values):
            values = values.detach().cpu().numpy()
        elif isinstance(values, (list, tuple)):
            values = array_of(values)
        elif isinstance(values, (pa.Array, pa.ChunkedArray)):
            values = _column(pa.chunked_array(getattr(values, "chunks", [values]), values.type))
        elif hasattr(values, "to_numpy"):
            values = _of_series(values)
        elif np.ndim(values) and hasattr(values, "__array__"):
            values = np.asarray(values)
        else:
            raise UsageError(
                f"{what} returned a {type(values).__name__} as column {name!r}: expected an "
                f"array or a list with one entry for each row"
            )
        found[str(name)] = values
    lengths = {name: len(values) for name, values in found.items()}
    if len(set(lengths.values())) > 1:
        raise UsageError(f"{what} returned columns of different lengths: {lengths}")
    return found


def _of_series(series: Any) -> Any:
    values = series.to_numpy()
    if values.dtype != object:
        return values
    if hasattr(series, "isna"):  # Pandas has several values for what is missing.
        values = np.where(series.isna(), None, values)
    return array_of(list(values))


# ---------------------------------------------------------------------------------- rows


def rows_of(batch: Batch) -> Iterator[dict[str, Any]]:
    """Yield each row as a dict: Python's own numbers and times, None for what is missing."""
    plain = {
        name: _values_of(batch[name] if isinstance(batch, dict) else batch.column(name))
        for name in columns_of(batch)
    }
    for number in range(num_rows(batch)):
        yield {name: values[number] for name, values in plain.items()}


def _values_of(column: Any) -> Any:
    """Return a sequence of the values of a column; arrays among them may be written to."""
    pa = arrow()
    if isinstance(column, np.ndarray):
        if column.ndim > 1 or column.dtype == object:
            return writable(column)
        # NumPy makes whole numbers of nanoseconds.
        return pa.array(column).to_pylist() if column.dtype.kind in "mM" else column.tolist()
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _values_of(column.cast(kind.value_type))
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if (is_number and column.null_count) or pa.types.is_temporal(kind) or pa.types.is_null(kind):
        return column.to_pylist()
    return _values_of(_column(column))


def of_rows(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Return a batch of rows; a missing value is None."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: array_of([row.get(name) for row in rows]) for name in names}


# --------------------------------------------------------------------------------- torch


def to_torch(batch: Batch, dtypes: Any = None, device: Any = None) -> dict[str, Any]:
    """Return a dict of tensors.

    Args:
        batch: whose columns are numbers.
        dtypes: a torch.dtype for all columns, or a dict by name.
        device: of the tensors, None for the CPU.

    Raises:
        UsageError: a column cannot be a tensor, or `dtypes` names one that is not there.
    """
    import torch

    columns, found = to_numpy(batch), {}
    if isinstance(dtypes, Mapping):
        check_columns(dtypes, columns, "iter_torch_batches: dtypes")
    for name, values in columns.items():
        if values.dtype == object:
            with contextlib.suppress(UsageError):  # A missing number is NaN, as in files.
                values = to_numpy(to_table({name: values}))[name]
        if values.dtype == object or values.dtype.kind not in "biufc":
            kind = type(values[0]).__name__ if len(values) else values.dtype
            raise UsageError(
                f"iter_torch_batches: column {name!r} holds {kind} values of different sizes or "
                f"kinds, which are no tensor: encode them in map_batches, drop_columns([{name!r}]),"
                f" or pass collate_fn"
            )
        if not values.flags.writeable or not values.flags.c_contiguous:
            values = np.array(values)
        dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
        found[name] = torch.as_tensor(values).to(device=device, dtype=dtype)
    return found
