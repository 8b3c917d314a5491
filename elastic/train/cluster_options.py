"""Checks and translates the arguments of `elastic.init`, which follow `ray.init`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from elastic.errors import ConfigError, UsageError
from elastic.train.config_checks import is_number, is_whole

IN_RUNTIME_ENV = {
    "pip": "install packages in the image or the environment that agents run in",
    "uv": "install packages in the image or the environment that agents run in",
    "conda": "start agents in that environment",
    "container": "start agents in that image",
    "image_uri": "start agents in that image",
    "py_modules": "put the modules where all nodes import them, or set PYTHONPATH in env_vars",
    "excludes": "nothing is packed: nodes read files from the same paths",
    "worker_process_setup_hook": "call it at the beginning of the train function",
}
"""Refused key of a `runtime_env` -> what to do instead."""
WITHOUT_EFFECT = frozenset({
    "configure_logging", "dashboard_host", "dashboard_port", "include_dashboard", "job_config",
    "log_to_driver", "logging_config", "logging_format", "logging_level", "namespace",
    "object_store_memory", "storage",
})  # fmt: skip
"""Arguments of `ray.init` for parts that do not exist here."""


def check_unknown(rest: Mapping[str, Any]) -> None:
    """Refuse unknown arguments, and those that would change the meaning of a script.

    Raises:
        UsageError: `local_mode`.
        TypeError: the argument is unknown to Ray, too.
    """
    for name in rest:
        if name == "local_mode":
            raise UsageError(
                "elastic.init(local_mode=...): expected ScalingConfig(num_workers=0), which runs "
                "the train function in this process"
            )
        if name not in WITHOUT_EFFECT and not name.startswith("_"):
            raise TypeError(f"elastic.init() got an unexpected keyword argument {name!r}")


def offered(
    num_cpus: float | None, num_gpus: float | None, resources: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the resources that the script's own cluster offers, {} for those detected.

    Raises:
        ConfigError: an amount is invalid; names it.
    """
    amounts: dict[str, float] = {}
    for name, value in (resources or {}).items():
        if not isinstance(name, str) or not is_number(value) or value < 0:
            raise ConfigError(
                f"elastic.init: resources[{name!r}]={value!r}: expected numbers of 0 or more by "
                f"name, such as {{'fast_disk': 2}}"
            )
        if name in ("CPU", "GPU"):
            raise ConfigError(f"elastic.init: resources has {name}: pass num_{name.lower()}s")
        amounts[name] = float(value)
    for key, asked in (("CPU", num_cpus), ("GPU", num_gpus)):
        if asked is None:
            continue
        if not is_whole(asked) or asked < 0:
            raise ConfigError(
                f"elastic.init: num_{key.lower()}s={asked!r}: expected an int, 0 or more"
            )
        amounts[key] = float(asked)
    return amounts


def slots(num_workers: int | None, amounts: Mapping[str, float]) -> int:
    """Return how many workers may run at once: by default one per processor, or per GPU if more."""
    if num_workers is not None:
        return num_workers
    cpus = amounts.get("CPU", len(os.sched_getaffinity(0)))
    return max(1, int(cpus), int(amounts.get("GPU", 0)))


def worker_env(runtime_env: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the variables for all workers of a script.

    Raises:
        ConfigError: it is no mapping, or its variables are not text.
        UsageError: it has unsupported keys; the message names the alternative.
    """
    if runtime_env is None:
        return {}
    if not isinstance(runtime_env, Mapping):
        raise ConfigError(
            f"elastic.init: runtime_env={runtime_env!r}: expected a dict such as "
            f"{{'env_vars': {{'NAME': 'value'}}}}"
        )
    for name, value in runtime_env.items():
        if name in ("env_vars", "config"):
            continue
        if name == "working_dir":
            if os.path.realpath(str(value)) != os.path.realpath(os.getcwd()):
                raise UsageError(
                    f"elastic.init: runtime_env has working_dir={value!r}: workers run where the "
                    f"script does ({os.getcwd()}), on all nodes: change to that directory first"
                )
            continue
        advice = IN_RUNTIME_ENV.get(name, "leave it out")
        raise UsageError(
            f"elastic.init: runtime_env has {name!r}, which is not done here: {advice}; expected "
            f"env_vars only"
        )
    variables = runtime_env.get("env_vars") or {}
    for name, value in dict(variables).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(
                f"elastic.init: runtime_env: env_vars[{name!r}]={value!r}: expected a str for a str"
            )
    return dict(variables)
