"""Search spaces: constants, domains that are sampled, and grids that are enumerated.

Rule: a space is validated before anything starts. An element that is no value, domain or grid is
rejected with its path, such as "train_loop_config/lr".
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from elastic.errors import ConfigError
from elastic.train.config_checks import GRID, Undrawn

Path = tuple[Any, ...]
"""Keys and indices, from the outermost one inward."""


@dataclass(frozen=True)
class Domain(Undrawn):
    """A set of values with a distribution.

    Attributes:
        kind: "float", "int", "normal", "choice" or "call".
        low, high: bounds; for ints without `q`, `high` is excluded. For "normal": mean and
            standard deviation.
        log: uniform in the logarithm.
        q: values are multiples of it; None for any value.
        options: the options of "choice".
        call: for "call": called with the config drawn so far.
    """

    kind: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    q: float | None = None
    options: tuple[Any, ...] = ()
    call: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a domain that has no values."""
        if self.kind == "choice":
            if not self.options:
                raise ConfigError("tune.choice([]): expected at least one option")
            return
        if self.kind not in ("float", "int"):
            return
        for bound in (self.low, self.high):
            if isinstance(bound, bool) or not isinstance(bound, (int, float)):
                raise ConfigError(f"tune: bound {bound!r}: expected a number")
        if not self.low < self.high:
            raise ConfigError(f"tune: bounds {self.low!r} and {self.high!r}: expected low < high")
        if self.log and self.low <= 0:
            raise ConfigError(f"tune: low={self.low!r} in a logarithmic space: expected > 0")
        if self.q is not None and not self.q > 0:
            raise ConfigError(f"tune: q={self.q!r}: expected > 0")

    @property
    def highest(self) -> float:
        """Return the greatest value that can be drawn."""
        if self.kind == "int":
            # As in Ray, ints exclude the upper bound unless they are quantized.
            return int(self.high) if self.q is not None else int(self.high) - 1
        return self.high

    def sample(self, random: Random) -> Any:
        """Draw a value, quantized to `q`."""
        if self.kind == "choice":
            return self.options[random.randrange(len(self.options))]
        if self.kind == "normal":
            return self.rounded(random.gauss(self.low, self.high))
        if self.kind == "float":
            if self.log:
                return self.rounded(math.exp(random.uniform(*map(math.log, (self.low, self.high)))))
            return self.rounded(random.uniform(self.low, self.high))
        if self.log:
            value = math.exp(random.uniform(math.log(self.low), math.log(self.highest + 1)))
            return int(self.rounded(min(int(value), self.highest)))
        return int(self.rounded(random.randint(int(self.low), int(self.highest))))

    def rounded(self, value: float) -> float:
        """Return the multiple of `q` in the bounds that is nearest to a value."""
        if self.q is None:
            return value
        # Only multiples within the bounds, without the rounding noise of binary fractions.
        low, high = (-math.inf, math.inf) if self.kind == "normal" else (self.low, self.highest)
        number = round(value / self.q)
        while number * self.q < low - 1e-12:
            number += 1
        while number * self.q > high + 1e-12 and (number - 1) * self.q >= low - 1e-12:
            number -= 1
        return float(f"{number * self.q:.12g}")


def uniform(lower: float, upper: float) -> Domain:
    """Floats from `lower` to `upper`."""
    return Domain("float", lower, upper)


def quniform(lower: float, upper: float, q: float) -> Domain:
    """Floats from `lower` to `upper` in steps of `q`."""
    return Domain("float", lower, upper, q=q)


def loguniform(lower: float, upper: float, base: float = 10) -> Domain:
    """Floats, uniform in their logarithm; the base has no effect."""
    return Domain("float", lower, upper, log=True)


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Domain:
    """Floats, uniform in their logarithm, in steps of `q`."""
    return Domain("float", lower, upper, log=True, q=q)


def randn(mean: float = 0.0, sd: float = 1.0) -> Domain:
    """Floats from a normal distribution."""
    return Domain("normal", mean, sd)


def qrandn(mean: float, sd: float, q: float) -> Domain:
    """Floats from a normal distribution in steps of `q`."""
    return Domain("normal", mean, sd, q=q)


def randint(lower: int, upper: int) -> Domain:
    """Ints from `lower` to `upper` - 1."""
    return Domain("int", lower, upper)


def qrandint(lower: int, upper: int, q: int = 1) -> Domain:
    """Ints from `lower` to `upper` inclusive, in steps of `q`."""
    return Domain("int", lower, upper, q=q)


def lograndint(lower: int, upper: int, base: float = 10) -> Domain:
    """Ints from `lower` to `upper` - 1, uniform in their logarithm."""
    return Domain("int", lower, upper, log=True)


def qlograndint(lower: int, upper: int, q: int, base: float = 10) -> Domain:
    """Ints from `lower` to `upper` inclusive, uniform in their logarithm, in steps of `q`."""
    return Domain("int", lower, upper, log=True, q=q)


def choice(categories: Sequence[Any]) -> Domain:
    """One of several values, which may themselves be spaces."""
    return Domain("choice", options=tuple(categories))


def sample_from(func: Callable[..., Any]) -> Domain:
    """The return value of a function of the config drawn so far (also `spec.config`, as in Ray)."""
    return Domain("call", call=func)


def grid_search(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Each of several values; several grids are tried in all combinations."""
    found = list(values)
    if not found:
        raise ConfigError("tune.grid_search([]): expected at least one value")
    return {GRID: found}


class Drawn(dict[str, Any]):
    """The config that `sample_from` functions receive: by key, attribute, or `spec.config`."""

    def __getattr__(self, name: str) -> Any:
        """Return a key's value, or this config as `config`.

        Raises:
            AttributeError: the key does not exist, or is not drawn yet.
        """
        if name in self:
            value = self[name]
            return Drawn(value) if isinstance(value, dict) else value
        if name == "config":
            return self
        raise AttributeError(f"sample_from: the config has no {name!r} yet: it has {sorted(self)}")


def is_grid(value: Any) -> bool:
    """Return whether a value was made by `grid_search`."""
    return isinstance(value, dict) and list(value) == [GRID]


def check(space: Any, where: str = "param_space") -> None:
    """Validate a space; the ConfigError names a key, its type, and what to use."""
    if isinstance(space, Domain):
        for number, option in enumerate(space.options):
            check(option, f"{where}[{number}]")
    elif is_grid(space):
        if not isinstance(space[GRID], (list, tuple)) or not space[GRID]:
            raise ConfigError(f"{where}: grid_search={space[GRID]!r}: expected a list of values")
        for number, option in enumerate(space[GRID]):
            check(option, f"{where}[{number}]")
    elif isinstance(space, Mapping):
        if GRID in space:
            raise ConfigError(f"{where}: grid_search beside {sorted(set(space) - {GRID})}")
        for key, part in space.items():
            if not isinstance(key, str):
                raise ConfigError(f"{where}: key {key!r} is a {type(key).__name__}, expected a str")
            check(part, f"{where}/{key}")
    elif isinstance(space, (list, tuple)):
        for number, part in enumerate(space):
            check(part, f"{where}[{number}]")
    elif _is_foreign(space):
        kind = f"{type(space).__module__}.{type(space).__qualname__}"
        raise ConfigError(
            f"{where} is a {kind}, which is not drawn from here; expected a value or one of "
            f"elastic.tune's own (tune.uniform, tune.choice, ...)"
        )
    elif inspect.isfunction(space) and space in SPACES:
        raise ConfigError(
            f"{where} is the function tune.{space.__name__} itself: call it, with its bounds"
        )


def _is_foreign(value: Any) -> bool:
    """Return whether a value is a distribution of another library."""
    home = type(value).__module__.partition(".")[0]
    return home in ("ray", "hyperopt", "optuna", "ConfigSpace", "skopt", "nevergrad") or (
        home == "scipy" and hasattr(value, "rvs")
    )


SPACES = (
    uniform, quniform, loguniform, qloguniform, randn, qrandn, randint, qrandint, lograndint,
    qlograndint, choice, sample_from, grid_search,
)  # fmt: skip


def grids(space: Any) -> list[tuple[Path, list[Any]]]:
    """Return the paths of a space's grids and their values, in the order of the keys."""
    return [(path, part[GRID]) for path, part in leaves(space) if is_grid(part)]


def leaves(space: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of every element that is not a container; a grid is one element."""
    if isinstance(space, Mapping) and not is_grid(space):
        for key, part in space.items():
            yield from leaves(part, (*path, key))
    elif isinstance(space, (list, tuple)):
        for number, part in enumerate(space):
            yield from leaves(part, (*path, number))
    else:
        yield path, space


def combinations(space: Any) -> Iterator[dict[Path, Any]]:
    """Yield all combinations of grid values, by path; a single {} without grids."""
    found = grids(space)
    for values in itertools.product(*(values for _, values in found)):
        yield dict(zip((path for path, _ in found), values, strict=True))


def draw(space: Any, random: Random, chosen: Mapping[Path, Any]) -> Any:
    """Return a config: grids as chosen, domains drawn, then functions called.

    Args:
        space: a validated space.
        random: source of the draws, which are in the order of the keys.
        chosen: path -> value, for each grid.
    """
    config = _drawn(space, random, chosen, ())
    for path, part in list(leaves(config)):
        if isinstance(part, Domain) and part.call is not None:
            config = put(config, path, part.call(Drawn(config)))
    return config


def _drawn(space: Any, random: Random, chosen: Mapping[Path, Any], path: Path) -> Any:
    if is_grid(space):
        return _drawn(chosen.get(path, space[GRID][0]), random, {}, path)
    if isinstance(space, Domain):
        if space.kind == "call":
            return space
        value = space.sample(random)
        return _drawn(value, random, {}, path) if space.kind == "choice" else value
    if isinstance(space, Mapping):
        return {k: _drawn(v, random, chosen, (*path, k)) for k, v in space.items()}
    if isinstance(space, (list, tuple)):
        parts = [_drawn(v, random, chosen, (*path, n)) for n, v in enumerate(space)]
        return parts if isinstance(space, list) else tuple(parts)
    return space


def put(config: Any, path: Path, value: Any) -> Any:
    """Return a copy of a config with another value at a path."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(config, (list, tuple)):
        parts = list(config)
        parts[key] = put(parts[key], rest, value)
        return parts if isinstance(config, list) else tuple(parts)
    return {**config, key: put(config[key], rest, value)}


def flat(config: Any) -> dict[str, Any]:
    """Return a flat config, with keys such as "optimizer/lr"."""
    return {"/".join(map(str, path)): value for path, value in leaves(config)}
