"""Options to open file systems with, such as keys, by the URL that a script gave them for.

Rule: they may be secret. They travel to other processes of a run in one environment variable, and
are in no message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elastic.errors import ConfigError

VARIABLE = "ELASTIC_STORAGE_OPTIONS"
"""Of a worker's environment: the options by URL, as JSON."""

_known: dict[str, dict[str, Any]] = {}


def remember(url: str, options: Mapping[str, Any]) -> None:
    """Open this URL, and what is below it, with these options from now on, in this process.

    Args:
        url: such as "s3://bucket/runs".
        options: keywords of the fsspec file system; none forgets earlier ones.

    Raises:
        ConfigError: an option cannot be sent to another process; names it.
    """
    for name, value in options.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"the file system of {url} was made with {name}=<{type(value).__name__}>, which "
                f"cannot be sent to workers: expected text, numbers, lists and dicts, such as "
                f"key= and secret=; or leave it out, and set it in the environment of the nodes"
            ) from None
    _known.pop(url.rstrip("/"), None)
    if options:
        _known[url.rstrip("/")] = dict(options)


def options_of(url: str) -> dict[str, Any]:
    """Return the options to open a URL with: those of the nearest URL above it, {} for none."""
    above = [one for one in _known if f"{url}/".startswith(f"{one}/")]
    return dict(_known[max(above, key=len)]) if above else {}


def as_environment() -> dict[str, str]:
    """Return the environment variable for other processes, {} if there are no options."""
    return {VARIABLE: json.dumps(_known)} if _known else {}


def take(environment: Mapping[str, str]) -> None:
    """Remember what another process has put into this environment.

    Raises:
        ConfigError: it is not what `as_environment` returns.
    """
    try:
        found = dict(json.loads(environment.get(VARIABLE, "{}")))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{VARIABLE}: {error}; expected options of file systems by URL, as JSON"
        ) from None
    for url, options in found.items():
        remember(url, options)
