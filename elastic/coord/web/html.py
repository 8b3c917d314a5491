"""HTML that escapes all text from outside, and contains no control characters.

Rule: only `element` makes markup; all other text is escaped where it enters. Names, metrics and
output come from users: terminal sequences are removed, and characters that would move or hide
other text on a page (control characters, direction overrides) are shown by their code.
"""

from __future__ import annotations

import html
import re
from typing import Any

TERMINAL = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # Titles, links: up to the bell or string terminator.
    r"|\x1b[P^_X][^\x1b]*(?:\x1b\\)?"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
)
UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]"
)
SURROGATE = re.compile(r"[\ud800-\udfff]")
VOID = frozenset({"br", "hr", "input", "link", "meta"})


class Html(str):
    """Markup; a value of any other class is text and gets escaped."""

    __slots__ = ()


def clean(text: str) -> str:
    """Return a text without terminal sequences, and with the codes of invisible characters."""
    if text.isprintable():
        return text
    text = TERMINAL.sub("", text)
    text = UNSEEN.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    return SURROGATE.sub("\ufffd", text)


def clean_output(text: str) -> str:
    """Return output as a terminal would show it: only the last version of a redrawn line."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return clean("\n".join(lines))


def escaped(value: Any) -> Html:
    """Return a value as escaped markup."""
    return value if isinstance(value, Html) else Html(html.escape(clean(str(value))))


def joined(*parts: Any) -> Html:
    """Return the concatenation of parts, escaped; None is skipped."""
    return Html("".join(escaped(part) for part in parts if part is not None))


def element(name: str, /, *children: Any, **attributes: Any) -> Html:
    """Return an element.

    Args:
        name: of the tag; not escaped.
        children: elements or texts; None is skipped.
        attributes: `class_` is "class" and `data_x` is "data-x"; None or False omits one,
            True writes it without a value.
    """
    parts = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        parts.append(f" {attribute}" if value is True else f' {attribute}="{escaped(value)}"')
    opening = f"<{name}{''.join(parts)}>"
    return Html(opening if name in VOID else f"{opening}{joined(*children)}</{name}>")
