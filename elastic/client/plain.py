"""Makes text from outside safe for a terminal: removes what the terminal would interpret.

A title, a cleared screen, a text in the clipboard: each is a few bytes in a project's name, a
reason or a line of output, and the reader need not be the author.
"""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.text import Text

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
IN_OUTPUT = re.compile(r"\x1b(?!\[[0-9;]*[mKA])|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
"""Progress bars and colours stay: carriage returns, backspaces, colours, a line up, its end."""


def plain(text: str) -> str:
    """Return a text in which control characters, but for tabs and ends of lines, are shown."""
    return CONTROL.sub(_shown, text)


def plain_output(text: str) -> str:
    """Return output of a worker in which nothing is left that moves more than its own line."""
    return IN_OUTPUT.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"


class PlainConsole(Console):
    """A console that shows control characters instead of interpreting them."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a text; rich calls this for all that is printed, and for the cells of tables."""
        return super().render_str(plain(text), **options)
