"""The options of every command that submits a job: where it may run, and its priority.

Rule: they are defined here once, for `elastic submit` and `elastic run`, with the same names,
texts and defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import click

from elastic.client.values import parse_amounts, parse_pairs
from elastic.core.config import PRIORITY_MAX, TRACKERS_VARIABLE, JobSpec
from elastic.core.facts import Resources, Strategy, sorted_pairs
from elastic.storage.trackers import parse_trackers

Command = Callable[..., Any]

# Variables (PET_*) are for what torchrun has.
_option = partial(click.option, allow_from_autoenv=False)

OPTIONS = (
    _option(
        "--resources", default="", callback=parse_amounts, metavar="NAME=N,...", show_default=False,
        help="What each worker takes from its node, such as CPU=2,GPU=1.",
    ),
    _option(
        "--placement-strategy", default="PACK", type=click.Choice([s.value for s in Strategy]),
        show_default=True, help="How workers spread over nodes.",
    ),
    _option("--accelerator-type", default="", show_default=False, help="Such as H100."),
    _option(
        "--label", "labels", multiple=True, callback=parse_pairs, metavar="NAME=VALUE",
        help="Only nodes that carry this label; may be repeated.",
    ),
    _option(
        "--max-preemptions", default=-1, type=click.IntRange(min=-1), show_default=True,
        help="How many nodes may be taken by notices and drains before the job fails; -1 for ever.",
    ),
    _option(
        "--priority", default=0, type=click.IntRange(-PRIORITY_MAX, PRIORITY_MAX), metavar="N",
        show_default=True, help="Of jobs that wait, those with a greater one go first.",
    ),
    _option(
        "--preemptible/--non-preemptible", default=True, show_default=True,
        help="Whether it gives way as a whole, saved, when a job of higher priority waits.",
    ),
    _option(
        "--tracker", "trackers", multiple=True, metavar="KIND[:WHERE]",
        help="Show what is reported in tensorboard[:DIR], json[:FILE], wandb:PROJECT or "
        "mlflow:URI, each report once; may be repeated.",
    ),
    _option(
        "--hang-timeout", default=30.0, type=click.FloatRange(min=0), metavar="SECONDS",
        show_default=True,
        help="A worker without progress for so long while all others wait for it is killed; if "
        "all wait for each other twice as long, they form a new group. 0 for never.",
    ),
    _option(
        "--env", multiple=True, callback=parse_pairs, metavar="NAME=VALUE",
        help="For the workers' environment; may be repeated.",
    ),
)  # fmt: skip

AMONG_JOBS = ("max_preemptions", "priority", "preemptible")
"""Options without effect if a job is alone on its cluster."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The values of these options; names are those of the flags.

    Attributes:
        resources: of each worker, beside the command's defaults.
        labels: that a node must carry.
        max_preemptions: -1 for no limit.
        hang_timeout: seconds, 0 for never.
        env: of the workers, set by the user.
        trackers: as `storage.trackers.parse_trackers` reads them.
    """

    resources: dict[str, float] = field(default_factory=dict)
    placement_strategy: str = Strategy.PACK.value
    accelerator_type: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    max_preemptions: int = -1
    priority: int = 0
    preemptible: bool = True
    hang_timeout: float = 30.0
    env: dict[str, str] = field(default_factory=dict)
    trackers: tuple[str, ...] = ()

    def apply(self, spec: JobSpec, defaults: dict[str, float]) -> JobSpec:
        """Return the job with these options.

        Args:
            spec: of the job; the user's environment overrides its own.
            defaults: resources of each worker that the user did not name.

        Raises:
            ConfigError: values that cannot work.
        """
        env = {**dict(spec.entry.env), **self.env}
        if self.trackers:
            env[TRACKERS_VARIABLE] = ",".join(self.trackers)
            parse_trackers(env[TRACKERS_VARIABLE])
        return replace(
            spec,
            entry=replace(spec.entry, env=sorted_pairs(env)),
            resources_per_worker=Resources.of({**defaults, **self.resources}),
            strategy=Strategy(self.placement_strategy),
            accelerator_type=self.accelerator_type,
            label_selector=sorted_pairs(self.labels),
            max_preemptions=self.max_preemptions,
            priority=self.priority,
            non_preemptible=not self.preemptible,
            hang_timeout_s=self.hang_timeout,
        )


def job_options(command: Command) -> Command:
    """Give a command these options."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def take_job_options(given: dict[str, Any]) -> JobOptions:
    """Take these options out of all that a command was given."""
    return JobOptions(**{each.name: given.pop(each.name) for each in fields(JobOptions)})
