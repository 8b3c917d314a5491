"""Detects this machine's GPUs (by NVML), processors and memory, once, when the agent starts.

Rule: no torch and no CUDA context, so that detection uses no GPU memory. What cannot be detected
is absent with a reason, never guessed.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.core.config import KNOWN_ACCELERATORS
from elastic.core.facts import Resources
from elastic.errors import ConfigError
from elastic.runtime import cgroup

log = logging.getLogger(__name__)

GIB = 1024**3
VENDOR_WORDS = ("NVIDIA", "TESLA", "GEFORCE", "QUADRO", "GRAPHICS", "DEVICE")
FORM_WORDS = re.compile(r"\d+GB|SXM\d*|PCIE|HBM\d*E?|NVL|MIG|LAPTOP|GPU|\d+G\.\d+GB")
NO_DEVICES = ("", "-1", "NoDevFiles", "none", "void")
"""Values of CUDA_VISIBLE_DEVICES (and of the container runtime's variable) that mean none."""


@dataclass(frozen=True)
class Gpu:
    """One GPU; `index` is the number that CUDA gives it.

    CUDA counts those that this process may open, in PCI bus order (CUDA_DEVICE_ORDER); NVML counts
    the others as well, such as those of another job of this machine.

    Attributes:
        is_shifted: NVML gives it another number. It is then passed on by UUID, because it is not
            known whether CUDA counts a broken GPU before it.
    """

    index: int
    uuid: str
    name: str
    is_shifted: bool = False


@dataclass(frozen=True)
class Devices:
    """The accelerators that workers of this node may use.

    Attributes:
        entries: one CUDA_VISIBLE_DEVICES entry per accelerator; empty on a CPU node.
        accelerator_type: such as "H100", "" for none.
        reason: where this comes from, for the log; or why there are none.
    """

    entries: tuple[str, ...] = ()
    accelerator_type: str = ""
    reason: str = ""


def find_devices(visible: str | None = None) -> Devices:
    """Ask NVML for the GPUs of this machine.

    Args:
        visible: CUDA_VISIBLE_DEVICES of the agent, None when it is not set.

    Returns:
        The devices; none, with the reason, when there are no GPUs or NVML is unavailable.

    Raises:
        ConfigError: `visible` names GPUs, and none of them exists.
    """
    if visible is not None and visible.strip() in NO_DEVICES:
        return Devices(reason=f"CUDA_VISIBLE_DEVICES={visible!r} hides all GPUs")
    gpus = read_nvml()
    found = Devices(reason=gpus) if isinstance(gpus, str) else choose_devices(gpus, visible)
    if visible is not None and not found.entries:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={visible!r} names GPUs, and none of them is to be had "
            f"({found.reason}): correct it, or set it to -1 for a node without GPUs"
        )
    return found


def read_nvml() -> tuple[Gpu, ...] | str:
    """Return the GPUs that the driver lists, or the reason why it lists none."""
    try:
        import pynvml
    except ImportError as error:
        return f"no GPUs: nvidia-ml-py cannot be imported ({error})"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"no GPUs: NVML reports {error}"
    found: list[Gpu] = []
    lost: list[str] = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
            except pynvml.NVMLError as error:
                # Broken, or belongs to another job of this machine (SLURM's ConstrainDevices).
                lost.append(f"GPU {index}: {error}")
                log.warning("gpu_left_out index=%d error=%r", index, str(error))
                continue
            is_shifted = index != len(found)
            found.append(Gpu(len(found), text_of(uuid), text_of(name), is_shifted))
    except pynvml.NVMLError as error:
        return f"no GPUs: NVML failed while counting them: {error}"
    finally:
        pynvml.nvmlShutdown()
    if lost and not found:
        return f"no GPUs: NVML can open none of {len(lost)} ({lost[0]})"
    return tuple(found) or "no GPUs: NVML counts none"


def text_of(value: str | bytes) -> str:
    """Return text; old releases of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def choose_devices(gpus: Sequence[Gpu], visible: str | None) -> Devices:
    """Keep the GPUs that `visible` names, in its order, by CUDA's own rules.

    An entry is an index, or a UUID or prefix of one. As in CUDA, an entry that matches no GPU hides
    itself and all later ones. MIG entries are kept unchanged.
    """
    if visible is None:
        entries = tuple(gpu.uuid if gpu.is_shifted else str(gpu.index) for gpu in gpus)
        return Devices(entries, type_of(gpus), f"{len(gpus)} found by NVML")
    kept: list[str] = []
    seen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        named = next((gpu for gpu in gpus if is_named(gpu, entry)), None)
        if entry in kept or (named is None and not entry.startswith("MIG-")):
            break
        kept.append(entry)
        seen += [named] if named is not None else list(gpus[:1])
    because = f"{len(kept)} of {len(gpus)} by CUDA_VISIBLE_DEVICES={visible!r}"
    return Devices(tuple(kept), type_of(seen), because)


def is_named(gpu: Gpu, entry: str) -> bool:
    """Return whether this entry of CUDA_VISIBLE_DEVICES names this GPU."""
    if entry.isdigit():
        return int(entry) == gpu.index
    return entry.startswith("GPU-") and gpu.uuid.startswith(entry)


def type_of(gpus: Iterable[Gpu]) -> str:
    """Return the most frequent type of the GPUs; the first if several are equally frequent."""
    types = [normalise_name(gpu.name) for gpu in gpus]
    return max(dict.fromkeys(types), key=types.count, default="")


def normalise_name(name: str) -> str:
    """Turn a product name into an accelerator type: "NVIDIA H100 80GB HBM3" into "H100".

    Returns:
        The known type in the name; otherwise the name without the words for vendor, memory and
        form, joined: "NVIDIA Titan Xp" gives "TITANXP".
    """
    words = re.findall(r"[A-Z0-9.]+", name.upper())
    pairs = [first + second for first, second in itertools.pairwise(words)]
    for word in (*pairs, *words):
        if word in KNOWN_ACCELERATORS:
            return str(word)
    remaining = [
        word for word in words if word not in VENDOR_WORDS and not FORM_WORDS.fullmatch(word)
    ]
    return "".join(remaining)[:40]


# --------------------------------------------------------------------------------- the whole node


def num_processors(cgroups: Path = cgroup.ROOT) -> int:
    """Return how many processors this process may use (limited by a container or taskset)."""
    has = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroup.cpu_limit(cgroups)
    return has if limit is None else min(has, max(1, math.floor(limit)))


def memory_gb(cgroups: Path = cgroup.ROOT) -> float:
    """Return the memory of the machine or its cgroup limit, the smaller, in GiB, one decimal."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup.memory_limit(cgroups)
    return round((total if limit is None else min(total, limit)) / GIB, 1)


def node_resources(devices: Devices, requested: Mapping[str, float]) -> Resources:
    """Return the node's resources: those detected, overridden by those requested.

    Raises:
        ConfigError: more GPUs are requested than were found.
    """
    found = {"CPU": float(num_processors()), "memory_gb": memory_gb()}
    if devices.entries:
        found["GPU"] = float(len(devices.entries))
    wanted = requested.get("GPU", 0)
    if wanted > len(devices.entries):
        raise ConfigError(
            f"--resources GPU={wanted:g}: this machine offers {len(devices.entries)} "
            f"({devices.reason}); ask for that many at most, or leave GPU out"
        )
    return Resources.of({**found, **requested})


def parse_resources(text: str) -> dict[str, float]:
    """Parse "GPU=8,CPU=32"; "auto" and "" override nothing.

    Raises:
        ConfigError: a part is not NAME=NUMBER, or a name comes twice.
    """
    if text.strip() in ("", "auto"):
        return {}
    amounts: dict[str, float] = {}
    for name, value in split_pairs("--resources", text):
        try:
            amounts[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"--resources {name}={value}: expected a number") from error
    Resources.of(amounts)
    return amounts


def parse_labels(text: str) -> tuple[tuple[str, str], ...]:
    """Parse "zone=a,disk=ssd" into sorted pairs.

    Raises:
        ConfigError: a part is not NAME=VALUE, or a name comes twice.
    """
    return tuple(sorted(split_pairs("--labels", text)))


def split_pairs(flag: str, text: str) -> list[tuple[str, str]]:
    """Split "a=1,b=2"; `flag` names the option in errors.

    Raises:
        ConfigError: a part has no "=" or no name, or a name comes twice.
    """
    pairs: dict[str, str] = {}
    for part in (part.strip() for part in text.split(",")):
        if not part:
            continue
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"{flag} {part!r}: expected name=value[,name=value...]")
        if name in pairs:
            raise ConfigError(f"{flag}: {name} is given twice, as {pairs[name]} and {value}")
        pairs[name] = value.strip()
    return list(pairs.items())


def parse_workers(text: str, devices: Devices) -> int:
    """Parse --workers: a number >= 1, or "auto": one per GPU, one on a CPU node.

    Raises:
        ConfigError: it is neither.
    """
    if text.strip() == "auto":
        return len(devices.entries) or 1
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"--workers {text!r}: expected auto, or a number of at least 1")
    return number


def worker_env(
    env: Mapping[str, str], devices: Devices, num_slots: int, cgroups: Path = cgroup.ROOT
) -> dict[str, str]:
    """Return the environment of spares; the user's own variables override the defaults here.

    The variables must be set before torch is imported, so a worker cannot set them itself.
    """
    # A vocabulary made of set(words) numbers them alike on all nodes, and after any restart.
    added, limit = {"PYTHONHASHSEED": "0"}, cgroup.cpu_limit(cgroups)
    if num_slots > 1:
        added["OMP_NUM_THREADS"] = "1"  # As torchrun does: workers share the processors.
    elif limit is not None:
        # The default, a thread per processor of the machine, would exceed the container's share.
        added["OMP_NUM_THREADS"] = str(num_processors(cgroups))
    if not env.keys() & {"TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG"}:
        # Hides c10d's warnings about normal conditions here, such as hosts without a name.
        added["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    if devices.entries:  # Also when the user chose by number in CUDA_VISIBLE_DEVICES.
        added["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order, in which they were counted.
    return {**added, **env}
