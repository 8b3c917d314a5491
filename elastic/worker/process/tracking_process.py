"""The process that reports a run to trackers: `python -m elastic.worker.process.tracking_process`.

Rule: it dies with the worker that started it. A tracker that fails is tried again, later and later,
and reported once; the others continue.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

import click

from elastic.errors import ConfigError
from elastic.storage import options as storage_options
from elastic.storage.trackers import TrackerSpec, Tracking, parse_trackers
from elastic.worker.process.main import EXIT_AGENT_GONE, die_with_parent, name_process, set_up_logs

POLL_S = 1.0
PAUSE_S_MAX = 60.0


class TrackerFeed:
    """Brings one tracker up to date, whatever it does."""

    def __init__(self, run: str, spec: TrackerSpec) -> None:
        self._run, self._request = run, spec
        self._tracking: Tracking | None = None
        self._pause_s, self._not_before, self._reported = POLL_S, 0.0, ""

    def turn(self, *, is_last: bool = False) -> None:
        """Report what is new, unless that failed a moment ago."""
        if time.monotonic() < self._not_before and not is_last:
            return
        try:
            if self._tracking is None:
                self._tracking = Tracking(self._run, self._request)
            self._tracking.turn()
            self._pause_s = POLL_S
            if is_last:
                self._tracking.close()
        except Exception as error:  # Whatever a tracker's package raises.
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
            self._not_before = time.monotonic() + self._pause_s
            if str(error) != self._reported:
                self._reported = str(error)
                print(
                    f"[elastic] tracker {self._request.kind}: {error}", file=sys.stderr, flush=True
                )
            if isinstance(error, ConfigError):
                self._not_before = float("inf")


@click.command(help="Sends trackers what a run reports; started by a worker.")
@click.argument("parent", type=int)
@click.argument("run")
@click.argument("wanted")
def main(parent: int, run: str, wanted: str) -> None:
    """Report until the input ends, and then what is left."""
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(EXIT_AGENT_GONE)
    name_process("elastic-tracker")
    # A signal to the whole node is left to the agent, as workers do.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    set_up_logs()
    storage_options.take(os.environ)
    feeds = [TrackerFeed(run, spec) for spec in parse_trackers(wanted)]
    while True:
        is_last = bool(select.select([sys.stdin], [], [], POLL_S)[0])
        for feed in feeds:
            feed.turn(is_last=is_last)
        if is_last:
            return


if __name__ == "__main__":
    main()
