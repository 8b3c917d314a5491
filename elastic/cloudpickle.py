"""The package cloudpickle, which scripts for Ray import from there."""

from cloudpickle import (
    CloudPickler,
    Pickler,
    dump,
    dumps,
    load,
    loads,
    register_pickle_by_value,
    unregister_pickle_by_value,
)

__all__ = [
    "CloudPickler",
    "Pickler",
    "dump",
    "dumps",
    "load",
    "loads",
    "register_pickle_by_value",
    "unregister_pickle_by_value",
]
