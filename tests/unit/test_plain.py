"""What others wrote reaches a terminal as text, not as orders."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from elastic.client.plain import PlainConsole, plain, plain_output

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\r\x7f"


def test_no_control_character_of_a_name_or_a_reason_reaches_the_terminal() -> None:
    assert plain(EVIL) == r"\x1b]0;owned\x07\x1b[2J\x9b31m\x08\x0d\x7f"
    assert plain("two\nlines\tgrößer 日本") == "two\nlines\tgrößer 日本"
    screen = io.StringIO()
    console: Console = PlainConsole(file=screen, force_terminal=True, color_system=None, width=200)
    table = Table()
    table.add_column("project")
    table.add_row(EVIL)
    console.print(table)
    console.print(f"[bold]job[/bold] {EVIL}")
    assert "\x1b]" not in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()
    assert screen.getvalue().count("owned") == 2
    assert not {"\x07", "\x08", "\x9b", "\x7f", "\r"} & set(screen.getvalue())


def test_output_keeps_its_colours_and_progress_bars_and_loses_the_rest() -> None:
    kept = "\x1b[31mred\x1b[0m\rstep 2\x1b[K\x1b[1A\n\tx\b"
    assert plain_output(kept) == kept
    assert plain_output("\x1b]52;c;aGk=\x07\x1b[2J\x1bc") == r"\x1b]52;c;aGk=\x07\x1b[2J\x1bc"
