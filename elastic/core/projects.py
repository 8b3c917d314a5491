"""What a project may have of the cluster: its weight beside others, and its limits.

Rule: a project is the label that jobs carry; one that nobody described has weight 1 and no limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.core.world import Resources
from elastic.errors import ConfigError

NO_LIMIT = 0
WEIGHT_MAX = 1_000_000.0


@dataclass(frozen=True, kw_only=True)
class ProjectShare:
    """The share of one project.

    Attributes:
        project: label of its jobs, "" for jobs without one.
        weight: of two projects whose jobs wait with the same priority, one with twice the weight
            gets twice the workers; > 0.
        max_workers: of all its jobs together, 0 for no limit.
        max_resources: what all its workers together may take, such as GPU=8; a name that is not
            in it is not limited.
    """

    project: str
    weight: float = 1.0
    max_workers: int = NO_LIMIT
    max_resources: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if not 0 < self.weight <= WEIGHT_MAX:
            raise ConfigError(
                f"project {self.project!r}: weight={self.weight}: expected a number above 0, at "
                f"most {WEIGHT_MAX:g}"
            )
        if self.max_workers < 0:
            raise ConfigError(
                f"project {self.project!r}: max_workers={self.max_workers}: expected a number of "
                f"workers, or 0 for no limit"
            )

    def excess(self, count: int, taken: Resources) -> str:
        """Return which limit `count` workers that take `taken` together are above, "" for none."""
        if self.max_workers and count > self.max_workers:
            return f"max_workers={self.max_workers}"
        amounts = dict(taken.milli)
        for name, limit in self.max_resources.milli:
            if amounts.get(name, 0) > limit:
                return f"{name}={limit / 1000:g}"
        return ""

    def fitting(self, need: Resources, most: int) -> int:
        """Return how many workers its limits leave room for if it has no others.

        Args:
            need: of each worker.
            most: no more are asked for.
        """
        count = min(most, self.max_workers) if self.max_workers else most
        limits = dict(self.max_resources.milli)
        for name, amount in need.milli:
            count = min(count, limits.get(name, count * amount) // amount)
        return count

    def limits(self) -> str:
        """Return its limits as they are written: "max_workers=8,GPU=8", "" for none."""
        return _limits(self.max_workers, self.max_resources.milli)

    def widened(self, need: Resources, count: int) -> str:
        """Return the limits that these workers are above, as they would have to be.

        Args:
            need: of each worker.
            count: of workers.
        """
        above = count if 0 < self.max_workers < count else NO_LIMIT
        taken = {name: count * amount for name, amount in need.milli}
        short = [n for n, limit in self.max_resources.milli if taken.get(n, 0) > limit]
        return _limits(above, [(name, taken[name]) for name in short])


def _limits(max_workers: int, milli: Iterable[tuple[str, int]]) -> str:
    parts = [f"max_workers={max_workers}"] if max_workers else []
    return ",".join([*parts, *(f"{name}={amount / 1000:g}" for name, amount in milli)])


def check_projects(projects: Iterable[ProjectShare]) -> None:
    """Refuse two descriptions of one project.

    Raises:
        ConfigError: naming it.
    """
    seen: dict[str, None] = {}
    for share in projects:
        if share.project in seen:
            raise ConfigError(f"project {share.project!r} is described twice: join the two")
        seen[share.project] = None


def parse_project(text: str) -> ProjectShare:
    """Read "vision:weight=2,max_workers=8,GPU=8".

    Raises:
        ConfigError: it is none.
    """
    project, colon, rest = text.partition(":")
    how = f"project {text!r}: expected NAME:weight=2,max_workers=8,GPU=8 (any of the three)"
    if not colon or not rest:
        raise ConfigError(how)
    amounts: dict[str, float] = {}
    for part in rest.split(","):
        name, equals, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not equals or not name or not 0 < number < float("inf") or name in amounts:
            raise ConfigError(f"{how}; {part!r} is no name with a number above 0, named once")
        amounts[name] = number
    weight, limit = amounts.pop("weight", 1.0), amounts.pop("max_workers", 0.0)
    if limit != int(limit):
        raise ConfigError(f"{how}; max_workers={limit:g} is no whole number")
    return ProjectShare(
        project=project, weight=weight, max_workers=int(limit), max_resources=Resources.of(amounts)
    )
