"""The words of the transcripts: each line is one event, or a look at the coordinator.

    agent NODE [slots=N] [incarnation=N]   an agent connects, with all the workers it remembers
    disconnect NODE                        its stream breaks; agent and workers live on
    submit JOB min=N [max=N] [FIELD=...]   a user submits; FIELD is one of JobSpec
    stop JOB [now=1]                       a user stops it
    checkpoint JOB                         a user wants a checkpoint now
    saved WORKER NUMBER PATH               the step engine's checkpoint of that number
    pause JOB | resume JOB                 a user pauses it, lets it go on
    scale JOB [min=N] [max=N]              a user sets other bounds
    drain NODE SECONDS                     an operator drains a node
    cordon NODE [REASON] | uncordon NODE   an operator lets no new workers start there, or again
    notice NODE SECONDS                    the agent says that its node must leave
    ready | forming | training | broken | finished WORKER...
    exit WORKER signal=N | code=N | stopped=1
    raise WORKER MESSAGE [position=TEXT]   user code raises, the process ends with code 1
    report WORKER INDEX [checkpoint=PATH]  train.report of the generation that the worker is in
    waits | stands | moves WORKER... [for=DURATION] [step=N]   of its main thread
    answer NODE                            the agent answers a probe
    tick DURATION                          time passes: 500ms, 2s
    dies-after-persist COMMAND...          the coordinator dies behind the first Persist of this
    restart                                another life of the coordinator; all streams break
    status                                 what a user is shown

Rule: a command that is not understood fails the scenario by line; nothing is guessed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import Any

from elastic.core.config import NS_PER_S
from elastic.core.events.shared import Tick
from elastic.core.facts import ExitCause, ExitKind, JobId, NodeId, ReportKind, WorkerPhase
from elastic.core.messages import LinksTried, ProbeAck
from tests.scenarios.transcript import lines_of, status_lines
from tests.unit.coordinator_under_test import Coordinator

PHASES = {
    "forming": WorkerPhase.FORMING, "training": WorkerPhase.TRAINING, "broken": WorkerPhase.BROKEN,
    "finished": WorkerPhase.FINISHED,
}  # fmt: skip
NUMBERS = (
    "step", "slots", "incarnation", "min", "max", "workers_per_replica", "max_failures",
    "num_to_keep", "hang_timeout_s", "priority", "in_place", "request", "reports_due",
    "micro_batches", "own_steps", "now", "grace_s", "spent",
)  # fmt: skip


class NotUnderstood(Exception):
    """A line of a scenario is no command."""


class Play:
    """One scenario: a coordinator, and the lines that came of the last command."""

    def __init__(self) -> None:
        self.coordinator = Coordinator()
        self.lines: list[str] = []

    def run(self, line: str) -> list[str]:
        """Do one command; return its output."""
        self.lines = []
        words = shlex.split(line)
        pairs = [word.partition("=") for word in words if "=" in word]
        options: dict[str, Any] = {
            name: int(value) if name in NUMBERS else value for name, _, value in pairs
        }
        name, *rest = [word for word in words if "=" not in word]
        if name == "dies-after-persist":
            self.coordinator.dies_after_persist = True
            name, *rest = rest
        act = COMMANDS.get(name)
        if act is None:
            raise NotUnderstood(f"unknown command {name!r}; known: {', '.join(sorted(COMMANDS))}")
        try:
            act(self, rest, options)
        except (TypeError, KeyError, ValueError) as error:
            raise NotUnderstood(f"{line!r}: {type(error).__name__}: {error}") from error
        return self.lines or ["ok"]

    def show(self) -> None:
        """Add the effects of the last step."""
        for effect in self.coordinator.effects:
            self.lines += lines_of(effect, self.coordinator.names)


def moments(play: Play, until_ns: int) -> Iterator[int]:
    """Return each moment until then at which the coordinator does something by itself."""
    machine = play.coordinator.machine
    while (due := machine.next_deadline_ns()) is not None and due <= until_ns:
        yield due


def agent(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    (name,) = rest
    play.coordinator.agent(name, **options)
    play.show()


def disconnect(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    play.coordinator.disconnect(*rest, **options)
    play.show()


def submit(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    (job,) = rest
    low = options.pop("min")
    play.coordinator.submit(job, low, options.pop("max", low), **options)
    play.show()


def stop(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    play.coordinator.stop(*rest, now=bool(options.get("now")))
    play.show()


def checkpoint(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    play.coordinator.checkpoint(*rest, **options)
    play.show()


def pause(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    play.coordinator.pause(*rest, **options)
    play.show()


def resume(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    play.coordinator.resume(*rest, **options)
    play.show()


def scale(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    (job,) = rest
    play.coordinator.scale(job, options.pop("min", 0), options.pop("max", 0), **options)
    play.show()


def cordon(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    play.coordinator.cordon(*rest, **options)
    play.show()


def uncordon(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    play.coordinator.cordon(*rest, cordoned=False, **options)
    play.show()


def saved(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    worker, number, path = rest
    kind = ReportKind.AUTOMATIC
    play.coordinator.reports(worker, int(number), checkpoint=path, kind=kind, **options)
    play.show()


def drain(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    play.coordinator.drain(rest[0], seconds(rest[1]), **options)
    play.show()


def notice(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    play.coordinator.notice(rest[0], seconds(rest[1]), **options)
    play.show()


def ready(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    for worker in rest:
        play.coordinator.effects = ()
        play.coordinator.ready(worker, **options)
        play.show()


def entering(phase: WorkerPhase) -> Command:
    """Return the command that lets workers enter a phase."""

    def enter(play: Play, rest: list[str], options: dict[str, Any]) -> None:
        for worker in rest:
            play.coordinator.effects = ()
            play.coordinator.update(worker, phase, **options)
            play.show()

    return enter


def leave(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    (worker,), ((how, value),) = rest, options.items()
    kind = {"signal": ExitKind.SIGNAL, "code": ExitKind.CODE, "stopped": ExitKind.STOPPED}[how]
    code = 0 if kind is ExitKind.STOPPED else int(value)
    play.coordinator.effects = ()
    play.coordinator.exits(worker, ExitCause(kind, code))
    play.show()


def raise_(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    play.coordinator.raises(*rest, **options)
    play.show()


def report(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    worker, index = rest
    play.coordinator.reports(worker, int(index), **options)
    play.show()


def pulsing(what: str) -> Command:
    """Return the command that lets workers say what their main threads do."""

    def pulse(play: Play, rest: list[str], options: dict[str, Any]) -> None:
        lasts = {what: seconds(options.pop("for"))} if what else {}
        for worker in rest:
            play.coordinator.effects = ()
            play.coordinator.pulse(worker, **lasts, **options)
            play.show()

    return pulse


def answer(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    (name,) = rest
    play.coordinator.says(name, ProbeAck(0), **options)
    play.show()


def tries(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    (name,) = rest
    reached, missed = (
        tuple(NodeId(n) for n in options[how].split(",") if n) for how in ("reaches", "misses")
    )
    play.coordinator.effects = ()
    play.coordinator.says(name, LinksTried(JobId(options["job"]), reached, missed))
    play.show()


def tick(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    (duration,) = rest
    coordinator = play.coordinator
    until_ns = coordinator.now_ns + round(seconds(duration) * NS_PER_S)
    for due in moments(play, until_ns):
        began = len(play.lines)
        coordinator.now_ns = due
        coordinator.step(Tick())
        play.show()
        if len(play.lines) > began:
            play.lines.insert(began, f"at {due / NS_PER_S:g}s")
    coordinator.now_ns = until_ns


def restart(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    play.coordinator.restart()
    play.show()


def status(play: Play, rest: list[str], options: dict[str, Any]) -> None:
    view = play.coordinator.machine.view(play.coordinator.now_ns)
    play.lines += status_lines(view)


def seconds(text: str) -> float:
    """Read 500ms or 2s."""
    if text.endswith("ms"):
        return float(text[:-2]) / 1000
    if text.endswith("s"):
        return float(text[:-1])
    raise NotUnderstood(f"duration {text!r}: expected such as 500ms or 2s")


Command = Callable[[Play, list[str], dict[str, Any]], None]
COMMANDS: dict[str, Command] = {
    "agent": agent, "disconnect": disconnect, "submit": submit, "stop": stop, "drain": drain,
    "notice": notice, "ready": ready, "exit": leave, "raise": raise_, "report": report,
    "waits": pulsing("waits"), "stands": pulsing("stands"), "moves": pulsing(""),
    "answer": answer, "tries": tries, "tick": tick, "restart": restart, "status": status,
    "checkpoint": checkpoint, "saved": saved, "pause": pause, "resume": resume, "scale": scale,
    "cordon": cordon, "uncordon": uncordon,
    **{name: entering(phase) for name, phase in PHASES.items()},
}  # fmt: skip
