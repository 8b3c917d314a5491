"""Converts dataclasses to protobuf messages and back; derived from dataclass and descriptor.

Rule: a dataclass and its message have the same fields, with the same names and matching types.
The two are compared when a `MessageCodec` is created, so a mismatch fails at import time, not in a
running cluster. Reading validates everything: a bad value raises `PeerError` with the field's
name. Absent fields are read as protobuf's defaults, as both sides speak the same version.
"""

from __future__ import annotations

import dataclasses
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from elastic.core.config import ENTRY_BYTES_MAX
from elastic.errors import ConfigError, InvariantViolation, PeerError, check

MESSAGE_BYTES_MAX = 2 * ENTRY_BYTES_MAX
"""Size limit of a message, on the pipe and over gRPC: twice what the largest job needs."""

FOR_PEOPLE = frozenset({
    "detail", "drain_reason", "error_type", "left", "message", "position", "reason", "text",
    "traceback",
})  # fmt: skip
"""String fields for display only: invalid Unicode in them is escaped, not rejected."""

WIDE = 16
"""Nested messages with at least so many fields, such as a job or a place in a group, reuse the
previous message and rewrite only changed fields: all receivers get nearly the same values."""

LABEL_REPEATED = 3
"""As in google/protobuf/descriptor.proto."""

SCALARS: Mapping[type, tuple[int, ...]] = {
    str: (FieldDescriptor.TYPE_STRING,),
    bytes: (FieldDescriptor.TYPE_BYTES,),
    bool: (FieldDescriptor.TYPE_BOOL,),
    float: (FieldDescriptor.TYPE_DOUBLE,),
    int: (
        FieldDescriptor.TYPE_INT32,
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_UINT32,
        FieldDescriptor.TYPE_UINT64,
    ),
}

Fact = TypeVar("Fact")
Proto = TypeVar("Proto", bound=Message)


@dataclass(frozen=True)
class ValueCodec:
    """Conversion of one value.

    Attributes:
        to_wire: converts a scalar or enum to protobuf's value; None if it needs no conversion.
        from_wire: the inverse; for a message, from the message itself.
        fill: writes a message's fields; None for a scalar or an enum.
        codec: codec of a nested dataclass; None for a message that is not a dataclass, as a pair.
    """

    from_wire: Callable[[Any], Any]
    to_wire: Callable[[Any], Any] | None = None
    fill: Callable[[Any, Message], None] | None = None
    codec: MessageCodec[Any] | None = None


@dataclass(frozen=True)
class FieldCodec:
    """One field of a dataclass, with its conversion to a message and back.

    Attributes:
        cleared: message field to clear before a write, "" if a write replaces the old value.
    """

    name: str
    write: Callable[[Any, Message], None]
    read: Callable[[Message], Any]
    cleared: str = ""


class MessageCodec(Generic[Fact]):
    """Converts one dataclass to the message of a descriptor, and back.

    Args:
        fact: the dataclass.
        descriptor: the message's descriptor (each protobuf backend has its own class for it).
        renamed: names of dataclasses and of their fields that differ on the wire, such as
            {"JobView": "Job", "since_ns": "age_ns"}; they apply to nested messages too.

    Raises:
        InvariantViolation: dataclass and message do not have the same fields.
    """

    def __init__(
        self, fact: type[Fact], descriptor: Any, renamed: Mapping[str, str] | None = None
    ) -> None:
        self._fact = fact
        renamed = renamed or {}
        hints = get_type_hints(fact)
        fields = dataclasses.fields(fact)  # type: ignore[arg-type]
        named = {renamed.get(field.name, field.name): field for field in fields}
        expected = renamed.get(fact.__name__, fact.__name__)
        check(descriptor.name == expected, f"{fact.__name__}: message is {descriptor.name}")
        missing = sorted(set(named) ^ set(descriptor.fields_by_name))
        check(not missing, f"{fact.__name__}: dataclass and message differ in {missing}")
        self._ports = tuple(
            _port(descriptor.fields_by_name[wire_name], field, hints[field.name], renamed)
            for wire_name, field in named.items()
        )
        # With one extra name, since attrgetter of a single name returns no tuple.
        self._values = operator.attrgetter(*(port.name for port in self._ports), "__class__")

    def fill(self, fact: Fact, target: Message) -> None:
        """Write all fields of `fact` into an empty message.

        Raises:
            ConfigError: a value cannot be encoded: a number out of range, a path that is not
                Unicode.
        """
        for port in self._ports:
            port.write(getattr(fact, port.name), target)

    def values(self, fact: Fact) -> tuple[Any, ...]:
        return self._values(fact)

    def refill(self, values: tuple[Any, ...], before: tuple[Any, ...], target: Message) -> None:
        """Write the values that are not identical (`is`) to those in `before`.

        `target` must hold `before`.

        Raises:
            ConfigError: as in `fill`; `target` is then in a mixed state.
        """
        is_new = map(operator.is_not, values, before)
        for port, value in compress(zip(self._ports, values, strict=False), is_new):
            if port.cleared:
                target.ClearField(port.cleared)
            port.write(value, target)

    def read(self, source: Message) -> Fact:
        """Return a message as a dataclass.

        Raises:
            PeerError: an unknown enum value, a missing part, or values that the dataclass rejects.
        """
        values = {port.name: port.read(source) for port in self._ports}
        try:
            return self._fact(**values)
        except ConfigError as error:
            raise PeerError(f"{source.DESCRIPTOR.name} refused: {error}") from error


def parse(proto: type[Proto], data: bytes) -> Proto:
    """Read bytes as a message; PeerError if the bytes are not a message of this type."""
    message = proto()
    try:
        message.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise PeerError(
            f"{len(data)} bytes do not read as {proto.DESCRIPTOR.full_name} ({error}); does the "
            f"other side run elastic-torch?"
        ) from error
    return message


# ------------------------------------------------------------------------------ one field


def _port(
    field: FieldDescriptor,
    known: dataclasses.Field[Any],
    hint: Any,
    renamed: Mapping[str, str],
) -> FieldCodec:
    name = field.name
    if get_origin(hint) is tuple:
        (item, _) = get_args(hint)
        check(_is_repeated(field), f"{field.full_name} must be repeated")
        return _repeated_port(name, known.name, _value(field, item, renamed))
    check(not _is_repeated(field), f"{field.full_name} must not be repeated")
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    bare = [option for option in options if option is not types.NoneType]
    check(len(bare) == 1, f"{field.full_name}: {hint} has no form on the wire")
    value = _value(field, bare[0], renamed)
    if value.fill is not None:
        return _message_port(field, known, value, optional=len(options) == 2)
    check(len(options) == 1, f"{field.full_name}: only a message can be absent")
    return _scalar_port(field, known.name, value)


def _scalar_port(field: FieldDescriptor, known: str, value: ValueCodec) -> FieldCodec:
    name, full_name = field.name, field.full_name
    to_wire, from_wire = value.to_wire, value.from_wire

    def write(item: Any, target: Message) -> None:
        try:
            setattr(target, name, to_wire(item) if to_wire else item)
        except UnicodeEncodeError as error:
            if known not in FOR_PEOPLE:
                raise ConfigError(f"{full_name}={item!r}: expected Unicode text") from error
            setattr(target, name, item.encode("utf-8", "backslashreplace").decode())
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{full_name}={item!r} cannot be sent: {error}") from error

    return FieldCodec(known, write, lambda source: from_wire(getattr(source, name)))


def _message_port(
    field: FieldDescriptor, known: dataclasses.Field[Any], value: ValueCodec, *, optional: bool
) -> FieldCodec:
    name, full_name, from_wire = field.name, field.full_name, value.from_wire
    codec, factory = value.codec, known.default_factory
    is_wide = len(field.message_type.fields) >= WIDE if field.message_type else False
    # The last values and their message: one entry, or one for each concurrently writing thread.
    # The values are kept alive, so that no other object can reuse their identity.
    last: list[tuple[tuple[Any, ...], Message]] = []

    def write(item: Any, target: Message) -> None:
        if item is None and optional:
            return
        part = getattr(target, name)
        # The part must be present even if no field in it is set.
        part.SetInParent()
        if codec is None:
            return
        if not is_wide or not _is_frozen(item):
            codec.fill(item, part)
            return
        values = codec.values(item)
        try:
            before, kept = last.pop()
        except IndexError:
            codec.fill(item, kept := type(part)())
        else:
            codec.refill(values, before, kept)
        last.append((values, kept))
        part.CopyFrom(kept)

    def read(source: Message) -> Any:
        if source.HasField(name):
            return from_wire(getattr(source, name))
        if optional:
            return None
        if factory is dataclasses.MISSING:
            raise PeerError(f"{full_name} is missing; the message has no meaning without it")
        return factory()

    return FieldCodec(known.name, write, read, cleared=name)


def _is_frozen(item: Any) -> bool:
    """Return whether a dataclass is frozen, so that its encoding can be reused."""
    return bool(item.__dataclass_params__.frozen)


def _repeated_port(name: str, known: str, value: ValueCodec) -> FieldCodec:
    fill, to_wire, from_wire = value.fill, value.to_wire, value.from_wire

    def write(items: Any, target: Message) -> None:
        into = getattr(target, name)
        for item in items:
            if fill:
                fill(item, into.add())
                continue
            try:
                into.append(to_wire(item) if to_wire else item)
            except (ValueError, OverflowError) as error:
                raise ConfigError(f"{known}={item!r} cannot be sent: {error}") from error

    def read(source: Message) -> Any:
        return tuple([from_wire(item) for item in getattr(source, name)])

    return FieldCodec(known, write, read, cleared=name)


# ------------------------------------------------------------------------------ one value


def _value(field: FieldDescriptor, hint: Any, renamed: Mapping[str, str]) -> ValueCodec:
    if get_origin(hint) is tuple:
        return _pair_value(field, hint)
    # NewType("JobId", str) is encoded as its base type.
    kind = getattr(hint, "__supertype__", hint)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if field.message_type is None:
            raise InvariantViolation(f"{field.full_name} must be a message")
        codec: MessageCodec[Any] = MessageCodec(kind, field.message_type, renamed)
        return ValueCodec(from_wire=codec.read, fill=codec.fill, codec=codec)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_value(kind, field)
    expected = SCALARS.get(kind, ())
    check(field.type in expected, f"{field.full_name}: its type on the wire is not that of {hint}")
    return ValueCodec(from_wire=lambda item: item, to_wire=_unicode if kind is str else None)


def _unicode(text: str) -> str:
    """Return the text if it is valid Unicode.

    Raises the same UnicodeEncodeError for all protobuf backends, which differ here.
    """
    if not text.isascii():
        text.encode()
    return text


def _pair_value(field: FieldDescriptor, hint: Any) -> ValueCodec:
    """Encode (name, value) pairs as messages of two fields, in that order."""
    described = field.message_type
    parts = sorted(described.fields, key=lambda part: part.number) if described else []
    kinds = get_args(hint)
    check(len(parts) == len(kinds) == 2, f"{field.full_name} must be pairs")
    first, second = (
        _scalar_port(part, part.name, _value(part, kind, {}))
        for part, kind in zip(parts, kinds, strict=True)
    )

    def fill(pair: tuple[Any, Any], target: Message) -> None:
        first.write(pair[0], target)
        second.write(pair[1], target)

    return ValueCodec(from_wire=lambda source: (first.read(source), second.read(source)), fill=fill)


def _enum_value(kind: type[Enum], field: FieldDescriptor) -> ValueCodec:
    """Map NodePhase.READY to NODE_PHASE_READY; reject 0 (unset) like any unknown number."""
    prefix = "".join(f"_{char}" if char.isupper() else char.upper() for char in kind.__name__)[1:]
    described = field.enum_type.values if field.enum_type else ()
    names = {value.name: value.number for value in described}
    expected = {f"{prefix}_{member.name}" for member in kind} | {f"{prefix}_UNSPECIFIED"}
    differing = sorted(set(names) ^ expected)
    check(not differing, f"{field.full_name}: {kind.__name__} and its enum differ in {differing}")
    check(names[f"{prefix}_UNSPECIFIED"] == 0, f"{field.full_name}: 0 must mean unspecified")
    numbers = {member: names[f"{prefix}_{member.name}"] for member in kind}
    members = {number: member for member, number in numbers.items()}
    full_name = field.full_name

    def from_wire(number: int) -> Enum:
        if number not in members:
            raise PeerError(
                f"{full_name}={number}: expected 1 to {len(members)}; install the same version of "
                f"elastic-torch on both sides"
            )
        return members[number]

    return ValueCodec(from_wire=from_wire, to_wire=numbers.__getitem__)


def _is_repeated(field: FieldDescriptor) -> bool:
    # protobuf 7 has removed labels; protobuf 5 has no `is_repeated`.
    repeated = getattr(field, "is_repeated", None)
    return getattr(field, "label", 0) == LABEL_REPEATED if repeated is None else bool(repeated)
