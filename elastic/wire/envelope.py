"""Envelopes: messages with exactly one body, one type for each direction of each channel.

Rule: an envelope has one body type for each member of its union, and no other. A received envelope
without a known body raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from elastic.core.messages import PROTOCOL
from elastic.errors import PeerError, check
from elastic.wire.codec import MessageCodec, parse

Body = TypeVar("Body")
Proto = TypeVar("Proto", bound=Message)


class Envelope(Generic[Body, Proto]):
    """Converts each member of a union of dataclasses to one envelope, and back.

    Args:
        proto: the message, with a oneof named "body".
        facts: the members of the union.
        renamed: see `MessageCodec`.

    Raises:
        InvariantViolation: the message's bodies and the union's members differ.
    """

    def __init__(
        self,
        proto: type[Proto],
        facts: tuple[type[Any], ...],
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self._proto = proto
        names = renamed or {}
        known = {names.get(fact.__name__, fact.__name__): fact for fact in facts}
        fields = {
            field.message_type.name: (field.name, field.message_type)
            for field in proto.DESCRIPTOR.oneofs[0].fields
            if field.message_type is not None
        }
        differing = sorted(set(known) ^ set(fields))
        check(not differing, f"{proto.DESCRIPTOR.name}: bodies and union differ in {differing}")
        self._codecs: dict[str, MessageCodec[Any]] = {}
        self._field_of: dict[type[Any], str] = {}
        for name, (field, described) in fields.items():
            self._codecs[field] = MessageCodec(known[name], described, names)
            self._field_of[known[name]] = field

    def to_proto(self, body: Body) -> Proto:
        """Return an envelope with `body`.

        Raises:
            ConfigError: a value in it cannot be encoded; see `MessageCodec.fill`.
        """
        field = self._field_of[type(body)]
        envelope = self._proto()
        part = getattr(envelope, field)
        part.SetInParent()
        self._codecs[field].fill(body, part)
        return envelope

    def from_proto(self, envelope: Proto) -> Body:
        """Return the body of an envelope.

        Raises:
            PeerError: no known body is set, or it does not decode.
        """
        field = envelope.WhichOneof("body")
        if field is None:
            raise PeerError(
                f"{envelope.DESCRIPTOR.name} without a body that protocol {PROTOCOL} knows; "
                f"expected one of {', '.join(self._codecs)}"
            )
        body: Body = self._codecs[field].read(getattr(envelope, field))
        return body

    def encode(self, body: Body) -> bytes:
        """Return `to_proto` as bytes.

        Raises:
            ConfigError: a value cannot be encoded (a number out of range, a name that is not
                Unicode).
        """
        return self.to_proto(body).SerializeToString()

    def decode(self, data: bytes) -> Body:
        """Return `from_proto` of bytes; PeerError if the bytes are not a valid envelope."""
        return self.from_proto(parse(self._proto, data))
