"""Checks of configuration fields; an invalid value is refused with the name of its field.

Rule: a wrong type is reported where it is written, not on submission or on a worker. A number is
kept as a plain Python one, whatever library it comes from.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

from elastic.errors import ConfigError

CALLBACK_METHODS = {"after_report": ("metrics",), "after_event": ("name", "fields")}
"""Methods of a callback, each with its arguments."""
FOR_TRIALS = "on_trial_result"
"""An object with this method is a callback of `tune.Tuner`."""
GRID = "grid_search"
"""The only key of a grid in a search space."""


class Undrawn:
    """Stands for a value that a Tuner draws for each trial; the base class of its domains."""


def is_undrawn(value: object) -> bool:
    """Return whether a Tuner has to draw a value, or a part of it, before it can be used."""
    if isinstance(value, Mapping):
        return list(value) == [GRID] or any(map(is_undrawn, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(is_undrawn, value))
    return isinstance(value, Undrawn)


def refuse(config: object, field: str, what: str) -> NoReturn:
    """Raise the ConfigError for a field's wrong value; `what` was expected in its place."""
    value = getattr(config, field)
    raise ConfigError(f"{type(config).__name__}: {field}={value!r}: expected {what}")


def expect(
    config: object, field: str, kind: type | tuple[type, ...], what: str, *, none: bool = False
) -> None:
    """Refuse a value of another class; `what` says the same in words."""
    value = getattr(config, field)
    if not (isinstance(value, kind) or (none and value is None)):
        refuse(config, field, what)


def expect_bool(config: object, field: str) -> None:
    """Refuse values that are merely truthy or falsy, such as "no"."""
    expect(config, field, bool, "True or False")


def take_int(
    config: object,
    field: str,
    what: str,
    *,
    low: int,
    high: float = math.inf,
    none: bool = False,
) -> None:
    """Keep a whole number within bounds as an int."""
    value = getattr(config, field)
    if none and value is None:
        return
    if not is_whole(value) or not low <= value <= high:
        refuse(config, field, what)
    _put(config, field, int(value))


def take_seconds(
    config: object, field: str, what: str, *, zero: bool = False, none: bool = False
) -> None:
    """Keep a finite number of seconds above 0, or from 0 on, as a plain one."""
    value = getattr(config, field)
    if none and value is None:
        return
    if not is_number(value) or not math.isfinite(value) or not (value > 0 or (zero and value == 0)):
        refuse(config, field, what)
    _put(config, field, int(value) if is_whole(value) else float(value))


def take_default(config: object, field: str, kind: type) -> None:
    """Replace None by the default configuration; refuse other classes, such as a dict."""
    if getattr(config, field) is None:
        _put(config, field, kind())
    expect(config, field, kind, f"a {kind.__name__}, such as {kind.__name__}(...), or None")


def is_whole(value: object) -> bool:
    """Return whether a value is an integer, including NumPy's, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a real number, including NumPy's, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def expect_names(config: object, field: str, what: str) -> Mapping[str, Any]:
    """Return a mapping whose keys are strings, an empty one for None."""
    expect(config, field, Mapping, what, none=True)
    names: Mapping[str, Any] = getattr(config, field) or {}
    if not all(isinstance(name, str) for name in names):
        refuse(config, field, what)
    return names


def expect_environment(config: object, field: str) -> None:
    """Refuse what cannot be environment variables of a process."""
    what = "a dict of environment variables, such as {'NAME': 'value'}"
    expect(config, field, Mapping, what, none=True)
    for key, value in (getattr(config, field) or {}).items():
        given = f"{type(config).__name__}: {field}[{key!r}]={value!r}"
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"{given}: expected a str for a str")
        if not key or "=" in key or "\0" in key + value:
            raise ConfigError(
                f"{given}: expected the name of an environment variable (at least one character, "
                f"no '='), and neither in it nor in its value the character NUL"
            )


def take_callbacks(config: object, field: str, kind: type) -> None:
    """Keep callbacks as a tuple; each is of this kind, or accepts its arguments."""
    callbacks = getattr(config, field)
    if callbacks is None:
        callbacks = ()
    if not isinstance(callbacks, (list, tuple)):
        refuse(config, field, "a list of callbacks, also of a single one: [callback]")
    for number, callback in enumerate(callbacks):
        receives = isinstance(callback, kind) or hasattr(callback, FOR_TRIALS)
        if not (receives or _can_be_reported(callback)):
            raise ConfigError(
                f"{type(config).__name__}: {field}[{number}]={callback!r}: expected a "
                f"train.UserCallback, or an object with after_report(metrics) and/or "
                f"after_event(name, fields)"
            )
    _put(config, field, tuple(callbacks))


def _can_be_reported(callback: object) -> bool:
    """Return whether a callback has any of our methods, and each accepts its arguments."""
    found = {name: getattr(callback, name, None) for name in CALLBACK_METHODS}
    methods = {name: method for name, method in found.items() if method is not None}
    return bool(methods) and all(
        callable(method) and _takes(method, CALLBACK_METHODS[name])
        for name, method in methods.items()
    )


def _takes(method: Any, arguments: tuple[str, ...]) -> bool:
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return True  # Some C functions have no signature.
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _put(config: object, field: str, value: object) -> None:
    object.__setattr__(config, field, value)  # Frozen, but only once `__post_init__` has ended.
