"""Expressions of columns, with the names of ray.data.expressions, computed by Arrow.

    ds.with_column("total", col("price") * col("quantity"))
    ds.filter(expr=(col("age") > 30) & col("name").str.starts_with("A"))

Rule: an expression calls functions of `pyarrow.compute`, or the user's, with arrays of values. What
depends on the numbers of rows (`numbers_rows`) is computed once, from the first row to the last.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import operator
import uuid as uuids
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from fsspec.implementations.arrow import ArrowFSWrapper

from elastic.data.batches import arrow, check_columns
from elastic.data.files import DataError, filesystem_of
from elastic.data.functions import Function
from elastic.errors import UsageError
from elastic.storage.faults import reason_of

DOWNLOADS = 16
"""Files that `download` reads at a time."""


def _compute() -> Any:
    arrow()
    return __import__("pyarrow.compute").compute


class Functions:
    """Functions of pyarrow.compute with one value for each row, as methods of an expression.

    Attributes:
        prefixes: what Arrow's names may have before a method's name.
        names: Arrow's names of methods that differ otherwise.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("",)
    names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, expr: Expr) -> None:
        """Make these the methods of an expression."""
        self._expr = expr

    def __getattr__(self, name: str) -> Callable[..., Expr]:
        """Return a function that makes the expression of a call.

        Raises:
            AttributeError: Arrow has no such function.
        """
        compute = None if name.startswith("_") else _compute()
        for one in (self.names.get(name, ""), *(prefix + name for prefix in self.prefixes)):
            if compute and hasattr(compute, one) and _is_scalar(one):
                return functools.partial(Call, one, self._expr)
        raise AttributeError(f"expression: pyarrow.compute has no function for {name!r}")


@functools.cache
def _is_scalar(name: str) -> bool:
    compute = _compute()
    known = name in compute.function_registry().list_functions()
    return known and compute.get_function(name).kind == "scalar"


class Expr(Functions):
    """A value for each row, computed from columns: `col("x") * 2`, `col("name").str.upper()`.

    Methods without a definition here are those of pyarrow.compute: `abs`, `round`, `is_null`,
    `fill_null`, `coalesce`, `if_else`, ....

    Attributes:
        name: of the column that it makes; None if it has no alias and is no column.
    """

    names: ClassVar[Mapping[str, str]] = {"fill_null": "coalesce", "is_not_null": "is_valid"}
    name: str | None = None
    __array_ufunc__ = None  # NumPy's numbers leave operators to ours.

    def __init__(self) -> None:
        """Create the expression; functions are called with it, not with another one."""

    @property
    def _expr(self) -> Expr:  # type: ignore[override]
        return self

    def of(self, table: Any, first: int) -> Any:
        """Return the values for the rows of a table: an array, or a scalar.

        Args:
            table: a pyarrow table.
            first: the number of its first row among all.
        """
        raise NotImplementedError

    @property
    def numbers_rows(self) -> bool:
        """Return whether the values depend on the numbers of rows."""
        return False

    def alias(self, name: str) -> Expr:
        """Return the same expression for a column of that name."""
        named = copy.copy(self)
        named.name = name
        return named

    def cast(self, target_type: Any, *, safe: bool = True) -> Expr:
        """Return the values as another Arrow type; not `safe`: what does not fit is cut."""
        return Call("cast", self, target_type, safe=safe)

    def is_in(self, values: Any) -> Expr:
        """Return whether each value is in a list."""
        return Call(_is_in, self, values)

    def not_in(self, values: Any) -> Expr:
        """Return whether each value is not in a list."""
        return ~self.is_in(values)

    @property
    def str(self) -> Strings:
        """Functions of text: `upper`, `contains`, `split`, ...."""
        return Strings(self)

    @property
    def list(self) -> Lists:
        """Functions of lists: `len`, `get`, `slice`, `sort`, `flatten`."""
        return Lists(self)

    @property
    def arr(self) -> Lists:
        """Functions of lists of one length."""
        return Lists(self)

    @property
    def struct(self) -> Structs:
        """Fields of structs: `struct["age"]`."""
        return Structs(self)

    @property
    def map(self) -> Maps:
        """Keys and values of maps."""
        return Maps(self)

    @property
    def dt(self) -> Times:
        """Functions of times: `year`, `strftime`, `floor("day")`, ...."""
        return Times(self)

    def __add__(self, other: Any) -> Expr:
        return Call(_plus, self, other)

    def __radd__(self, other: Any) -> Expr:
        return Call(_plus, other, self)

    def __sub__(self, other: Any) -> Expr:
        return Call("subtract", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return Call("subtract", other, self)

    def __mul__(self, other: Any) -> Expr:
        return Call("multiply", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return Call("multiply", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return Call("divide", self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return Call("divide", other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return Call(_floor_divided, self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return Call(_floor_divided, other, self)

    def __mod__(self, other: Any) -> Expr:
        return self - (self // other) * other

    def __rmod__(self, other: Any) -> Expr:
        return lit(other) % self

    def __neg__(self) -> Expr:
        return Call("negate", self)

    def __invert__(self) -> Expr:
        return Call("invert", self)

    def __and__(self, other: Any) -> Expr:
        return Call("and_kleene", self, other)

    def __rand__(self, other: Any) -> Expr:
        return Call("and_kleene", other, self)

    def __or__(self, other: Any) -> Expr:
        return Call("or_kleene", self, other)

    def __ror__(self, other: Any) -> Expr:
        return Call("or_kleene", other, self)

    def __gt__(self, other: Any) -> Expr:
        return Call("greater", self, other)

    def __ge__(self, other: Any) -> Expr:
        return Call("greater_equal", self, other)

    def __lt__(self, other: Any) -> Expr:
        return Call("less", self, other)

    def __le__(self, other: Any) -> Expr:
        return Call("less_equal", self, other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return Call("equal", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return Call("not_equal", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise UsageError(
            f"expression {self!r} is true or false for each row, not as a whole: write & for 'and',"
            f" | for 'or', ~ for 'not', and parentheses around comparisons"
        )


class Column(Expr):
    """The values of a column."""

    def __init__(self, column: str) -> None:
        self.column = self.name = column

    def __repr__(self) -> str:
        return f"col({self.column!r})"

    def of(self, table: Any, first: int) -> Any:
        """Return its values.

        Raises:
            UsageError: there is no such column.
        """
        check_columns([self.column], table.column_names, repr(self))
        return table.column(self.column)


class Given(Expr):
    """An expression of pyarrow.compute."""

    def __init__(self, expression: Any) -> None:
        self._expression = expression

    def __repr__(self) -> str:
        return str(self._expression)

    def of(self, table: Any, first: int) -> Any:
        """Return its values."""
        rows = __import__("pyarrow.dataset").dataset.dataset(table)
        return rows.to_table(columns={"x": self._expression}).column("x")


class RowNumber(Expr):
    """The number of each row, from 0 on."""

    def __repr__(self) -> str:
        return "monotonically_increasing_id()"

    def of(self, table: Any, first: int) -> Any:
        """Return the numbers."""
        return arrow().array(np.arange(first, first + table.num_rows))

    @property
    def numbers_rows(self) -> bool:
        """Return True."""
        return True


class Call(Expr):
    """A function called with the values of expressions, and with constants."""

    def __init__(self, function: str | Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a function of pyarrow.compute, by its name, or another one, with arrays."""
        self._function = function
        self._args = args
        self._kwargs = kwargs

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self._kwargs.items()]
        text = self._function if isinstance(self._function, str) else self._function.__name__
        return f"{text.strip('_')}({', '.join([*map(repr, self._args), *named])})"

    @property
    def numbers_rows(self) -> bool:
        """Return whether an argument depends on the numbers of rows."""
        return any(
            one.numbers_rows
            for one in (*self._args, *self._kwargs.values())
            if isinstance(one, Expr)
        )

    def of(self, table: Any, first: int) -> Any:
        """Return what the function returns."""

        def value(one: Any) -> Any:
            return one.of(table, first) if isinstance(one, Expr) else one

        args = [value(one) for one in self._args]
        kwargs = {name: value(one) for name, one in self._kwargs.items()}
        if isinstance(self._function, UserFunction):
            return self._function(*args, **kwargs)
        function = self._function
        if isinstance(function, str):
            function = getattr(_compute(), function)
        return function(*map(_plain, args), **kwargs)


def _plain(values: Any) -> Any:
    """Return values as Arrow's functions take them: tensors as lists, categories decoded."""
    pa = arrow()
    if isinstance(values, pa.Array):
        values = pa.chunked_array([values])
    if isinstance(values, pa.ChunkedArray):
        if isinstance(values.type, pa.BaseExtensionType):
            kind = values.type.storage_type
            return pa.chunked_array([chunk.storage for chunk in values.chunks], kind)
        if pa.types.is_dictionary(values.type):
            return values.cast(values.type.value_type)
    return values


# ----------------------------------------------------------------------------- what users call


def col(name: str) -> Expr:
    """Return the values of a column."""
    return Column(name)


def lit(value: Any) -> Expr:
    """Return a constant."""
    return Call(_constant, value)


def udf(return_dtype: Any = None) -> Callable[[Any], Any]:
    """Make a function of arrays, or a class of such callables, one of expressions.

        @udf(DataType.int64())
        def add(a: pa.ChunkedArray, b: pa.ChunkedArray):
            return pc.add(a, b)

        ds.with_column("sum", add(col("a"), col("b")))

    It is called with the rows of a batch, as pyarrow arrays, and returns a value for each: a
    pyarrow or NumPy array, a pandas series, or a list. Of a class each process makes one instance.

    Args:
        return_dtype: the Arrow type of the result; None for that of what is returned.
    """

    def decorated(given: Any) -> Any:
        if not inspect.isclass(given):
            return functools.partial(Call, UserFunction(Function(given), return_dtype))

        @functools.wraps(given, updated=())
        def instance(*args: Any, **kwargs: Any) -> Any:
            function = Function(given, constructor_args=args, constructor_kwargs=kwargs)
            return functools.partial(Call, UserFunction(function, return_dtype))

        return instance

    return decorated


pyarrow_udf = udf


@dataclass
class UserFunction:
    """A user's function of arrays; see `udf`."""

    function: Function
    kind: Any

    @property
    def __name__(self) -> str:
        return self.function.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and return its result as an array of Arrow, or one value as a scalar."""
        pa = arrow()
        found = self.function(*args, **kwargs)
        if isinstance(found, (pa.Array, pa.ChunkedArray, pa.Scalar)):
            return found if self.kind in (None, found.type) else found.cast(self.kind)
        if isinstance(found, np.ndarray) and found.ndim > 1:
            return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(found))
        is_one = np.ndim(found) == 0
        return pa.scalar(found, self.kind) if is_one else pa.array(found, self.kind)


@dataclass
class Unnested:
    """The fields of structs, each as a column; see `unnest`."""

    expression: Expr


def unnest(expr: Expr) -> Unnested:
    """Make each field of a struct a column: `ds.with_columns(unnest(col("address")))`."""
    if not isinstance(expr, Expr):
        raise UsageError(f"unnest: got {expr!r}: expected an expression, such as col('address')")
    return Unnested(expr)


def download(uri_column_name: str, *, filesystem: Any = None) -> Expr:
    """Return the content of files, whose paths are in a column, as bytes.

    Args:
        uri_column_name: of fsspec's paths, such as "s3://bucket/key"; of a missing one is None.
        filesystem: one of fsspec's or pyarrow's, None for that of each path.
    """
    return Call(_downloaded, col(uri_column_name), filesystem=filesystem)


def monotonically_increasing_id() -> Expr:
    """Return the number of each row, from 0 on."""
    return RowNumber()


def random(*, seed: int | None = None, reseed_after_execution: bool = True) -> Expr:
    """Return a number from 0 to 1 for each row, which depends on its number and the seed alone.

    Args:
        seed: None is 0.
        reseed_after_execution: Ray's, without effect here.
    """
    del reseed_after_execution
    return Call(_random, RowNumber(), seed=seed or 0)


def uuid() -> Expr:
    """Return a UUID for each row; others for each call of this function."""
    return Call(_uuids, RowNumber(), seed=uuids.uuid4().int)


def expression_of(given: Any, what: str) -> Expr:
    """Return an expression as one of ours.

    Args:
        given: such an expression, one of pyarrow.compute, or text such as "age > 30".
        what: the argument, for errors.

    Raises:
        UsageError: it is no expression.
    """
    if isinstance(given, Expr):
        return given
    if isinstance(given, str):
        return _parsed(given, what)
    if isinstance(given, _compute().Expression):
        return Given(given)
    raise UsageError(
        f"{what}={given!r}: expected an expression such as col('x') * 2, of "
        f"elastic.data.expressions"
    )


_OPERATORS: Mapping[type, Callable[[Any, Any], Expr]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.And: operator.and_,
    ast.Or: operator.or_,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.In: Expr.is_in,
    ast.NotIn: Expr.not_in,
}


def _parsed(text: str, what: str) -> Expr:
    def visit(node: ast.AST) -> Expr:
        if isinstance(node, ast.Expression):
            return visit(node.body)
        if isinstance(node, ast.Name):
            return col(node.id)
        if isinstance(node, (ast.Constant, ast.List, ast.Tuple)):
            return lit(ast.literal_eval(node))
        if isinstance(node, ast.BoolOp):
            return functools.reduce(_OPERATORS[type(node.op)], map(visit, node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            return ~visit(node.operand) if isinstance(node.op, ast.Not) else -visit(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](visit(node.left), visit(node.right))
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS and len(node.ops) == 1:
            return _OPERATORS[type(node.ops[0])](visit(node.left), visit(node.comparators[0]))
        raise UsageError(
            f"{what}={text!r}: {ast.unparse(node)!r} is not understood: expected comparisons of "
            f"columns with constants, joined by 'and', 'or', 'not'; or pass an expression such as "
            f"col('x') > 2, of elastic.data.expressions, or a function"
        )

    try:
        return visit(ast.parse(text, mode="eval"))
    except SyntaxError as error:
        raise UsageError(f"{what}={text!r}: {error}") from error


# ---------------------------------------------------------------------------------- namespaces


class Strings(Functions):
    """Functions of text; Ray's names for them."""

    prefixes = ("utf8_", "string_", "binary_", "")
    names: ClassVar[Mapping[str, str]] = {
        "byte_len": "binary_length",
        "contains": "match_substring",
        "count": "count_substring",
        "count_regex": "count_substring_regex",
        "extract": "extract_regex",
        "find": "find_substring",
        "find_regex": "find_substring_regex",
        "len": "utf8_length",
        "match": "match_like",
        "match_regex": "match_substring_regex",
        "replace": "replace_substring",
        "replace_regex": "replace_substring_regex",
        "slice": "utf8_slice_codeunits",
        "split": "split_pattern",
        "split_regex": "split_pattern_regex",
    }

    def strip(self, characters: str | None = None) -> Expr:
        """Remove characters at both ends; None for white space."""
        return self._trimmed("trim", characters)

    def lstrip(self, characters: str | None = None) -> Expr:
        """Remove characters at the beginning."""
        return self._trimmed("ltrim", characters)

    def rstrip(self, characters: str | None = None) -> Expr:
        """Remove characters at the end."""
        return self._trimmed("rtrim", characters)

    def _trimmed(self, how: str, characters: str | None) -> Expr:
        if characters is None:
            return Call(f"utf8_{how}_whitespace", self._expr)
        return Call(f"utf8_{how}", self._expr, characters=characters)

    def pad(self, width: int, fillchar: str = " ", side: str = "right") -> Expr:
        """Fill up to a width, at the side "left", "right" or "both"."""
        functions = {"left": "utf8_lpad", "right": "utf8_rpad", "both": "utf8_center"}
        if side not in functions:
            raise UsageError(f"str.pad: side={side!r}: expected one of {', '.join(functions)}")
        return Call(functions[side], self._expr, width=width, padding=fillchar)


class Lists(Functions):
    """Functions of lists, also of arrays of one shape."""

    prefixes = ("list_",)
    names: ClassVar[Mapping[str, str]] = {"len": "list_value_length"}

    def __getitem__(self, key: int | slice) -> Expr:
        """Return an element, or a slice."""
        if isinstance(key, slice):
            return self.slice(key.start, key.stop, key.step)
        return self.get(key)

    def get(self, index: int) -> Expr:
        """Return an element of each list; those below 0 count from its end."""
        return Call(_element, self._expr, index)

    def slice(
        self, start: int | None = None, stop: int | None = None, step: int | None = None
    ) -> Expr:
        """Return the elements from `start` to `stop`, neither below 0."""
        return Call("list_slice", self._expr, start or 0, stop, 1 if step is None else step)

    def sort(self, order: str = "ascending", null_placement: str = "at_end") -> Expr:
        """Return each list in order."""
        return Call(_lists_sorted, self._expr, order, null_placement)

    def flatten(self) -> Expr:
        """Return one list for each list of lists."""
        return Call(_flattened, self._expr)

    def to_list(self) -> Expr:
        """Return lists of one length as lists of any."""
        return Call(_lists, self._expr)


class Structs(Functions):
    """Fields of structs."""

    prefixes = ("struct_",)
    names: ClassVar[Mapping[str, str]] = {"field_by_index": "struct_field"}

    def __getitem__(self, key: str | int) -> Expr:
        """Return a field by its name or number."""
        return Call("struct_field", self._expr, key)


class Maps(Functions):
    """Keys and values of maps."""

    prefixes = ("map_",)

    def keys(self) -> Expr:
        """Return the keys, as a list."""
        return Call(_of_map, self._expr, 0)

    def values(self) -> Expr:
        """Return the values, as a list."""
        return Call(_of_map, self._expr, 1)


class Times(Functions):
    """Functions of times."""

    def strftime(self, fmt: str) -> Expr:
        """Return texts."""
        return Call("strftime", self._expr, format=fmt)

    def ceil(self, unit: str, multiple: int = 1) -> Expr:
        """Return the end of the unit: "year", "month", "day", "hour", ...."""
        return Call("ceil_temporal", self._expr, multiple, unit)

    def floor(self, unit: str, multiple: int = 1) -> Expr:
        """Return the beginning of the unit."""
        return Call("floor_temporal", self._expr, multiple, unit)

    def round(self, unit: str, multiple: int = 1) -> Expr:
        """Return the end or the beginning, whichever is nearer."""
        return Call("round_temporal", self._expr, multiple, unit)


# ----------------------------------------------------- what Arrow has no one function for


def _constant(value: Any) -> Any:
    return arrow().scalar(value)


def _typed(value: Any) -> Any:
    return value if hasattr(value, "type") else arrow().scalar(value)


def _plus(left: Any, right: Any) -> Any:
    """Add numbers, or concatenate strings."""
    compute, types = _compute(), arrow().types
    left, right = _typed(left), _typed(right)
    if any(types.is_string(one.type) or types.is_large_string(one.type) for one in (left, right)):
        return compute.binary_join_element_wise(left, right, "")
    return compute.add(left, right)


def _floor_divided(left: Any, right: Any) -> Any:
    """Divide and round down, as Python does; Arrow rounds whole numbers towards 0."""
    compute, types = _compute(), arrow().types
    left, right = _typed(left), _typed(right)
    found = compute.divide(left, right)
    if not types.is_integer(found.type):
        return compute.floor(found)
    rest = compute.subtract(left, compute.multiply(found, right))
    signs = compute.xor(compute.less(rest, 0), compute.less(right, 0))
    is_above = compute.and_(compute.not_equal(rest, 0), signs)
    return compute.subtract(found, is_above.cast(found.type))


def _is_in(left: Any, values: Any) -> Any:
    pa = arrow()
    values = values.as_py() if isinstance(values, pa.Scalar) else values
    is_array = isinstance(values, (pa.Array, pa.ChunkedArray))
    return _compute().is_in(left, value_set=values if is_array else pa.array(list(values)))


def _lists(values: Any) -> Any:
    """Return lists of any length, in one chunk."""
    values = values.combine_chunks()
    if arrow().types.is_fixed_size_list(values.type):
        values = values.cast(arrow().list_(values.type.value_type))
    return values


def _ends(lists: Any) -> Any:
    """Return where each list ends in the sequence of all elements, with a 0 before."""
    compute, pa = _compute(), arrow()
    lengths = compute.fill_null(compute.list_value_length(lists), 0).cast(pa.int32())
    return pa.concat_arrays([pa.array([0], pa.int32()), compute.cumulative_sum(lengths)])


def _relisted(lists: Any, ends: Any, values: Any) -> Any:
    mask = lists.is_null() if lists.null_count else None
    return arrow().ListArray.from_arrays(ends, values, mask=mask)


def _element(values: Any, index: int) -> Any:
    compute, pa = _compute(), arrow()
    if index >= 0:
        return compute.list_element(values, index)
    lists = _lists(values)
    shortest = compute.min(compute.list_value_length(lists)).as_py()
    if shortest is not None and shortest < -index:
        raise pa.ArrowInvalid(f"index {index} of a list of {shortest}")
    places = compute.add(_ends(lists)[1:], index)
    places = compute.if_else(lists.is_valid(), places, pa.scalar(None, pa.int32()))
    return compute.list_flatten(lists).take(places)


def _lists_sorted(values: Any, order: str, null_placement: str) -> Any:
    compute, lists = _compute(), _lists(values)
    flat = compute.list_flatten(lists)
    rows = arrow().table(
        [compute.list_parent_indices(lists), flat.is_null(), flat], ["row", "null", "value"]
    )
    nulls = "ascending" if null_placement == "at_end" else "descending"
    places = compute.sort_indices(
        rows, sort_keys=[("row", "ascending"), ("null", nulls), ("value", order)]
    )
    return _relisted(lists, _ends(lists), flat.take(places))


def _flattened(values: Any) -> Any:
    compute, outer = _compute(), _lists(values)
    inner = _lists(arrow().chunked_array([compute.list_flatten(outer)]))
    return _relisted(outer, _ends(inner).take(_ends(outer)), compute.list_flatten(inner))


def _of_map(values: Any, place: int) -> Any:
    pa, compute = arrow(), _compute()
    kind = values.type
    if pa.types.is_map(kind):
        pair = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        values = values.cast(pa.list_(pair))
    lists = _lists(values)
    return _relisted(
        lists, _ends(lists), compute.struct_field(compute.list_flatten(lists), [place])
    )


def _downloaded(uris: Any, *, filesystem: Any) -> Any:
    def content(uri: str | None) -> bytes | None:
        if uri is None:
            return None
        try:
            fs, path = (filesystem, uri) if filesystem is not None else filesystem_of(uri)
            return bytes(fs.cat_file(path))
        except Exception as error:
            raise DataError(f"download: cannot read {uri}: {reason_of(error)}") from error

    if filesystem is not None and not hasattr(filesystem, "cat_file"):
        filesystem = ArrowFSWrapper(filesystem)
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        found: Sequence[bytes | None] = list(pool.map(content, uris.to_pylist()))
    return arrow().array(found, arrow().binary())


def _random(rows: Any, *, seed: int) -> Any:
    return arrow().array(_generator(rows, seed, 1).random(len(rows)))


def _uuids(rows: Any, *, seed: int) -> Any:
    words = _generator(rows, seed, 2).integers(0, 2**64, (len(rows), 2), np.uint64).tolist()
    return arrow().array([str(uuids.UUID(int=a << 64 | b, version=4)) for a, b in words])


def _generator(rows: Any, seed: int, draws: int) -> Any:
    """Return a generator for consecutive rows, each of which draws so many 64-bit numbers."""
    bits = np.random.PCG64(seed)
    bits.advance(draws * rows[0].as_py())
    return np.random.Generator(bits)
