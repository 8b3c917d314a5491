"""Commands wait through a coordinator's restart, all by the same means."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from elastic.client.cli import main
from elastic.client.endpoints import Endpoints
from elastic.client.terminal import RESTART_S
from elastic.errors import CoordinatorUnreachable
from elastic.wire.generated.elastic.v1 import jobs_pb2


class Restarts:
    """A coordinator that answers from the third attempt on, if anybody makes one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
        self.asked = 0

        def ask(endpoints: Endpoints, endpoint: str, *args: Any, **more: Any) -> object:
            self.asked += 1
            if self.asked < 3:
                raise CoordinatorUnreachable(endpoint, "refused")
            return answer

        monkeypatch.setattr(Endpoints, "_call_one", ask)


@pytest.mark.parametrize("timeout", [(), ("--timeout", "500")])
def test_a_command_is_repeated_until_somebody_answers(
    monkeypatch: pytest.MonkeyPatch, timeout: tuple[str, ...]
) -> None:
    monkeypatch.setattr("elastic.client.terminal.RESTART_S", 500.0)
    restarts = Restarts(monkeypatch, jobs_pb2.ResumeResponse())
    done = CliRunner().invoke(main, ["resume", "job", *timeout])
    assert (done.exit_code, restarts.asked) == (0, 3), done.output


@pytest.mark.parametrize(
    "words",
    ["resume j", "uncordon n", "cordon n", "scale j --max 2", "status", "ps", "pause j", "stop j"],
)
def test_every_command_says_how_long(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    waits: list[float] = []
    monkeypatch.setattr(
        "elastic.client.jobs.Client.wait_for_answers", lambda client, wait_s: waits.append(wait_s)
    )
    for more in ([], ["--timeout", "0.5"]):
        CliRunner().invoke(main, ["-c", "127.0.0.1:1", *words.split(), *more])
    assert waits == [RESTART_S, 0.5]
