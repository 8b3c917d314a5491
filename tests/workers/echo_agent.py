"""An agent with echo workers: the whole elastic-agent without torch.

Run as `python echo_agent.py DIRECTORY FLAG...` with the flags of `elastic-agent`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from elastic.agent import cli
from elastic.agent.driver import AgentSettings

ECHO = (sys.executable, str(Path(__file__).with_name("echo_worker.py")))
read_settings = cli.read_settings


def with_echo(*given: object) -> AgentSettings:
    """Return the settings of the flags, with the echo worker as the command for spares."""
    settings = read_settings(*given)  # type: ignore[arg-type]
    env = {**settings.launch.env, "PYTHONPATH": str(Path(__file__).parents[2])}
    launch = dataclasses.replace(settings.launch, command=ECHO, zygote=(), env=env)
    return dataclasses.replace(settings, launch=launch)


if __name__ == "__main__":
    cli.read_settings = with_echo
    os.environ.setdefault("ELASTIC_LOG_LEVEL", "debug")
    cli.main()
