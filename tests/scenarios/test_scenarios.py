"""Whole stories, told by the coordinator itself: commands, and every effect that they had.

A `.txt` file beside this one is a row of blocks, parted by blank lines. Lines that begin with
"#" are prose. Any other block is commands, a line "----", and the output that is expected (the
style of etcd's raft). After a change that is meant:

    pytest tests/scenarios --rewrite-scenarios

and then read the difference: it is what your change does to people's jobs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.commands import NotUnderstood, Play

STORIES = sorted(Path(__file__).parent.glob("*.txt"))
LINE = "----"


def play(text: str, name: str) -> str:
    """Return the story with the output that its commands have now."""
    stage, told = Play(), []
    number = 1
    for block in text.rstrip("\n").split("\n\n"):
        lines = block.split("\n")
        prose = [line for line in lines if line.startswith("#")]
        rest = lines[len(prose) :]
        if lines[: len(prose)] != prose:
            raise NotUnderstood(f"{name}:{number}: prose comes before commands, not between")
        commands = rest[: rest.index(LINE)] if LINE in rest else rest
        output: list[str] = []
        for offset, command in enumerate(commands, start=number + len(prose)):
            try:
                output += stage.run(command)
            except NotUnderstood as error:
                raise NotUnderstood(f"{name}:{offset}: {error}") from error
        # Several commands that have no effect have none together.
        output = [line for line in output if line != "ok"] or ["ok"]
        told.append("\n".join([*prose, *commands, *([LINE, *output] if commands else [])]))
        number += len(lines) + 1
    return "\n\n".join(told) + "\n"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_the_story_goes_as_it_is_written(path: Path, rewrites: bool) -> None:
    written = path.read_text()
    now = play(written, path.name)
    if rewrites:
        path.write_text(now)
    else:
        assert now == written, "if it is meant: pytest tests/scenarios --rewrite-scenarios"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_says_in_prose_what_it_is_about(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_there_are_stories_of_all_that_the_design_promises() -> None:
    assert {path.stem for path in STORIES} >= {
        "agent_started_anew", "below_min_and_back", "coordinator_restart", "drain", "hung_worker",
        "join_at_a_boundary", "node_lost", "restart_before_announcing", "silent_node",
        "split_brain", "two_jobs", "user_failure", "worker_killed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dance n1", r"x.txt:1: unknown command 'dance'; known: agent, answer, broken"),
        ("# One.\nagent n1\nagent n2 colour=red", r"x.txt:3: 'agent n2 colour=red': TypeError"),
        ("agent n1\n----\nok\n\nready n1/9", r"x.txt:5: 'ready n1/9': KeyError"),
        ("tick 5", r"x.txt:1: duration '5': expected such as 500ms or 2s"),
        ("agent n1\n# And then?", r"x.txt:1: prose comes before commands"),
    ],
)
def test_a_line_that_is_not_understood_is_named(text: str, says: str) -> None:
    with pytest.raises(NotUnderstood, match=says):
        play(text, "x.txt")


def test_a_story_that_went_otherwise_is_written_as_it_went() -> None:
    assert play("agent n1\n----\nn1 <- farewell\n", "x.txt") == (
        "agent n1\n----\nn1 <- welcome\n"
        "note node_registered node=n1 slots=1 workers=0 host=host-n1\n"
    )
