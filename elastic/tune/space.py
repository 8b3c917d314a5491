"""What a config may be: values, domains that are drawn from, and grids that are gone through.

Rule: what a space says is known before anything starts; what is no value, no domain and no grid is
refused by its path, such as "train_loop_config/lr".
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

Path = tuple[Any, ...]
"""Keys, from the outermost one inward."""
GRID = "grid_search"


@dataclass(frozen=True)
class Domain:
    """A set of values with a distribution.

    Attributes:
        kind: "float", "int", "normal", "choice" or "call".
        low, high: bounds; of ints `high` is not in it. Of "normal": mean and deviation.
        log: uniform in the logarithm.
        q: values are multiples of it; None for any.
        options: of "choice".
        call: of "call": called with the config that was drawn so far.
    """

    kind: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    q: float | None = None
    options: tuple[Any, ...] = ()
    call: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        """Refuse what has no values."""
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
        """Return the greatest value that may be drawn."""
        if self.kind == "int":
            # Ray's ints leave out the upper bound, unless they are quantized.
            return int(self.high) if self.q is not None else int(self.high) - 1
        return self.high

    def sample(self, random: Random) -> Any:
        """Draw a value."""
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
        # Multiples inside of the bounds only, written without what binary fractions add.
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
    """Floats, uniform in their logarithm; the base changes nothing."""
    return Domain("float", lower, upper, log=True)


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Domain:
    """Floats, uniform in their logarithm, in steps of `q`."""
    return Domain("float", lower, upper, log=True, q=q)


def randn(mean: float = 0.0, sd: float = 1.0) -> Domain:
    """Floats of a normal distribution."""
    return Domain("normal", mean, sd)


def qrandn(mean: float, sd: float, q: float) -> Domain:
    """Floats of a normal distribution in steps of `q`."""
    return Domain("normal", mean, sd, q=q)


def randint(lower: int, upper: int) -> Domain:
    """Ints from `lower` to `upper` - 1."""
    return Domain("int", lower, upper)


def qrandint(lower: int, upper: int, q: int = 1) -> Domain:
    """Ints from `lower` to `upper`, that one included, in steps of `q`."""
    return Domain("int", lower, upper, q=q)


def lograndint(lower: int, upper: int, base: float = 10) -> Domain:
    """Ints from `lower` to `upper` - 1, uniform in their logarithm."""
    return Domain("int", lower, upper, log=True)


def qlograndint(lower: int, upper: int, q: int, base: float = 10) -> Domain:
    """Ints from `lower` to `upper`, uniform in their logarithm, in steps of `q`."""
    return Domain("int", lower, upper, log=True, q=q)


def choice(categories: Sequence[Any]) -> Domain:
    """One of several values, which may be spaces in turn."""
    return Domain("choice", options=tuple(categories))


def sample_from(func: Callable[..., Any]) -> Domain:
    """What a function returns, called with the config drawn so far; `spec.config` is it, too."""
    return Domain("call", call=func)


def grid_search(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Each of several values; several grids are gone through in all combinations."""
    found = list(values)
    if not found:
        raise ConfigError("tune.grid_search([]): expected at least one value")
    return {GRID: found}


class Drawn(dict[str, Any]):
    """A config as `sample_from` functions see it: by key, by attribute, and as `spec.config`."""

    def __getattr__(self, name: str) -> Any:
        """Return a key's value, or this config as `config`.

        Raises:
            AttributeError: there is no such key, or it is not drawn yet.
        """
        if name in self:
            value = self[name]
            return Drawn(value) if isinstance(value, dict) else value
        if name == "config":
            return self
        raise AttributeError(f"sample_from: the config has no {name!r} yet: it has {sorted(self)}")


def is_grid(value: Any) -> bool:
    """Return whether a value is what `grid_search` returns."""
    return isinstance(value, dict) and list(value) == [GRID]


def check(space: Any, where: str = "param_space") -> None:
    """Refuse what is no space.

    Raises:
        ConfigError: naming the key, what it is, and what to write.
    """
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
    """Return whether it is a distribution of another library."""
    home = type(value).__module__.partition(".")[0]
    return home in ("ray", "hyperopt", "optuna", "ConfigSpace", "skopt", "nevergrad") or (
        home == "scipy" and hasattr(value, "rvs")
    )


SPACES = (
    uniform, quniform, loguniform, qloguniform, randn, qrandn, randint, qrandint, lograndint,
    qlograndint, choice, sample_from, grid_search,
)  # fmt: skip


def grids(space: Any) -> list[tuple[Path, list[Any]]]:
    """Return where a space has grids, and their values, in the order of the keys."""
    return [(path, part[GRID]) for path, part in leaves(space) if is_grid(part)]


def leaves(space: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of everything that is not itself a dict or a list."""
    if isinstance(space, Mapping) and not is_grid(space):
        for key, part in space.items():
            yield from leaves(part, (*path, key))
    elif isinstance(space, (list, tuple)):
        for number, part in enumerate(space):
            yield from leaves(part, (*path, number))
    else:
        yield path, space


def combinations(space: Any) -> Iterator[dict[Path, Any]]:
    """Yield a value for each grid's path, in all combinations; one {} without grids."""
    found = grids(space)
    for values in itertools.product(*(values for _, values in found)):
        yield dict(zip((path for path, _ in found), values, strict=True))


def draw(space: Any, random: Random, chosen: Mapping[Path, Any]) -> Any:
    """Return a config: grids as they were chosen, domains drawn, functions called last.

    Args:
        space: a checked one.
        random: draws, in the order of the keys.
        chosen: by path, for each grid.
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
    """Return a config with another value at a path."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(config, (list, tuple)):
        parts = list(config)
        parts[key] = put(parts[key], rest, value)
        return parts if isinstance(config, list) else tuple(parts)
    return {**config, key: put(config[key], rest, value)}


def flat(config: Any) -> dict[str, Any]:
    """Return a config by paths such as "optimizer/lr"."""
    return {"/".join(map(str, path)): value for path, value in leaves(config)}
