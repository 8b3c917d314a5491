"""Every private name of torch and Python that this package touches, and what happens without it.

Rule: a change that touches another one adds it here; `tests/tidy/test_private_names.py` finds it. A
worker's process looks all of them up before it takes work: a name that is needed and not there is
refused, with what to install; without another something is left out (see its row), and the log
names it.
"""

from __future__ import annotations

import logging
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from elastic.errors import UsageError

log = logging.getLogger(__name__)

LOWEST, BELOW = (2, 9), (2, 16)
TORCH_RANGE = f"torch>={LOWEST[0]}.{LOWEST[1]},<{BELOW[0]}.{BELOW[1]}"
ANY_TORCH = "ELASTIC_ANY_TORCH"
"""Set it to 1 to try a torch outside of the range."""
GROUPS = "no group can be formed in a running process"
HELD = "errors of collectives are checked before a script sees them"
C10D = "torch.distributed.distributed_c10d"
MESH = "torch.distributed.device_mesh"
SCALER = "torch.amp.grad_scaler"


class PrivateName(NamedTuple):
    """A private name, and what happens without it; "" where we cannot do without."""

    module: str
    path: str
    need: str
    without: str = ""


NAMES = (
    PrivateName(C10D, "ProcessGroupGloo.create_device", GROUPS),
    PrivateName(C10D, "ProcessGroupGloo._Options", GROUPS),
    PrivateName(C10D, "_world.pg_map", GROUPS),
    PrivateName(C10D, "_world.pg_names", GROUPS),
    PrivateName(C10D, "_world.pg_group_ranks", GROUPS),
    PrivateName(C10D, "_world.pg_backend_config", GROUPS),
    PrivateName(C10D, "_world.pg_to_tag", GROUPS),
    PrivateName(C10D, "_world.tags_to_pg", GROUPS),
    PrivateName(C10D, "_world.pg_coalesce_state", GROUPS),
    PrivateName(C10D, "_world.default_pg", GROUPS),
    PrivateName(C10D, "_world.group_count", "survivors and newcomers name keys of the store alike"),
    PrivateName(C10D, "_update_default_pg", GROUPS),
    PrivateName(C10D, "_unregister_all_process_groups", GROUPS),
    PrivateName(C10D, "_get_default_group", "who needs a group joins it first, or is refused"),
    PrivateName(C10D, "_get_default_store", "a run in the user's own process shares facts by it"),
    PrivateName(C10D, "_set_pg_timeout", "timeouts of a group that is formed"),
    PrivateName(C10D, "Work.wait", "waits of scripts end with their group"),
    PrivateName(C10D, "Work.is_completed", "waits of scripts end with their group"),
    PrivateName(C10D, "Work._get_op_type", "a wait reports its collective"),
    PrivateName(C10D, "ProcessGroup._get_backend", "connections of a group are cut"),
    PrivateName(C10D, "ProcessGroup._get_sequence_number_for_group", "who is behind is named"),
    PrivateName(C10D, "ProcessGroupGloo._set_default_timeout", "timeouts of a group that forms"),
    PrivateName(C10D, "ProcessGroupGloo._Options._timeout", "timeouts of a group that forms"),
    PrivateName(C10D, "ProcessGroupGloo._Options._devices", GROUPS),
    PrivateName(C10D, "ProcessGroupGloo._Options._threads", "gloo is seen to have come to its end"),
    PrivateName(
        MESH, "DeviceMesh._thread_id", "layouts of groups that are gone differ from new ones"
    ),
    PrivateName("torch.nn.parallel", "DistributedDataParallel._pre_forward", HELD),
    PrivateName("torch.nn.parallel", "DistributedDataParallel._post_forward", HELD),
    PrivateName("torch.nn", "Module._parameters", "ranks that differ are found"),
    PrivateName("torch.nn", "Module._buffers", "buffers are put back"),
    PrivateName("torch.nn", "Module._non_persistent_buffers_set", "ranks that differ are found"),
    PrivateName("torch", "Tensor._version", "buffers that forward changes are found"),
    PrivateName("torch.xpu", "_is_compiled", "no driver is started before a fork"),
    PrivateName("torch._C", "_current_graph_task_id", "gradients are reduced while backward runs"),
    PrivateName(
        "torch.autograd.graph", "_engine_run_backward", "gradients are reduced in backward"
    ),
    PrivateName("torch.nn.modules.batchnorm", "_NormBase", "buffers of batch norm are reduced"),
    PrivateName(
        "torch.autograd", "_unsafe_preserve_version_counter", "buffers are put back in place"
    ),
    PrivateName(
        "torch._C",
        "_profiler._RecordFunctionFast",
        "profilers show the parts of a step",
        without="they are not shown",
    ),
    PrivateName("torch", "_foreach_add_", "gradients are added at once"),
    PrivateName("torch", "_foreach_copy_", "snapshots are copied at once"),
    PrivateName(
        "torch.utils.data._utils.worker", "_worker_info", "streams are dealt to loader workers"
    ),
    PrivateName(
        "torch.utils.data._utils.signal_handling",
        "_error_if_any_worker_fails",
        "a killed process of a loader is no error of the script",
    ),
    PrivateName(SCALER, "GradScaler._lazy_init_scale_growth_tracker", "scalers step once"),
    PrivateName(SCALER, "GradScaler._scale", "scalers step once"),
    PrivateName(SCALER, "GradScaler._per_optimizer_states", "scalers forget a step that is void"),
    PrivateName("torch.distributed.checkpoint._nested_dict", "flatten_state_dict", "checkpoints"),
    PrivateName("torch.distributed.checkpoint.filesystem", "_StorageInfo", "checkpoints"),
    PrivateName(
        "torch.distributed.tensor.debug",
        "_clear_sharding_prop_cache",
        "layouts of groups that are gone are forgotten",
        without="they stay in memory, unused",
    ),
    PrivateName("sys", "_current_frames", "a hang is distinguished from work"),
    PrivateName("sys", "_getframe", "libraries that ask for their rank early are found"),
    PrivateName("threading", "_shutdown", "threads of a script end before its process"),
    PrivateName("runpy", "_run_module_as_main", "a job of `-m` is in `__main__`, as under Python"),
    PrivateName("atexit", "_run_exitfuncs", "what a script registered with atexit is called"),
)


def missing(names: tuple[PrivateName, ...] = NAMES) -> tuple[PrivateName, ...]:
    """Return the names that this torch lacks, of those modules that are imported."""
    return tuple(name for name in names if not _is_there(name))


def _is_there(name: PrivateName) -> bool:
    found: Any = sys.modules.get(name.module)
    if found is None:
        return True  # Looked up once it is imported; a test imports all.
    for part in name.path.split("."):
        if not hasattr(found, part):
            return _do_instances_have(found, part)
        found = getattr(found, part)
    return True


def _do_instances_have(owner: Any, name: str) -> bool:
    """Return whether a class gives this to its instances alone: its methods name it then."""
    codes = [getattr(one, "__code__", None) for one in vars(owner).values()]
    return isinstance(owner, type) and any(
        name in (*code.co_names, *code.co_consts) for code in codes if code is not None
    )


def check_torch(environ: Mapping[str, str], version: str | None = None) -> None:
    """Refuse a torch that lacks what we need, or was not tried; `environ` may allow any release.

    The UsageError says what to install.
    """
    version = version or torch.__version__
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = tuple(map(int, numbers.groups())) if numbers else (0, 0)
    if not LOWEST <= release < BELOW and environ.get(ANY_TORCH) != "1":
        raise UsageError(
            f"torch {version} is installed, and elastic-torch was tried with {TORCH_RANGE} only: "
            f"install one of those, or set {ANY_TORCH}=1 to take the risk"
        )
    for name in missing():
        if not name.without:
            raise UsageError(
                f"torch {version} on Python {platform.python_version()} has no {name.module}."
                f"{name.path}, without which this does not work: {name.need}; install "
                f"{TORCH_RANGE}"
            )
        log.warning("torch_lacks name=%s.%s then=%r", name.module, name.path, name.without)
