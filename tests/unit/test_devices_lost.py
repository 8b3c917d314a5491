"""GPUs that NVML cannot open: they are left out, and the others stay."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from elastic.agent.devices import Devices, find_devices, parse_workers, worker_env
from elastic.errors import ConfigError


class NVMLError(Exception):
    pass


def plant(patch: pytest.MonkeyPatch, lost: set[int], count: int = 8) -> None:
    """Have NVML show so many GPUs, of which it cannot open these."""

    def handle(index: int) -> int:
        if index in lost:
            raise NVMLError("GPU is lost")
        return index

    nvml = ModuleType("pynvml")
    vars(nvml).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle:08d}",
        nvmlDeviceGetName=lambda handle: "NVIDIA H100 80GB HBM3",
    )
    patch.setitem(sys.modules, "pynvml", nvml)


def test_a_lost_gpu_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, {5})
    found = find_devices()
    # NVML's numbers behind it may not be CUDA's.
    assert found.entries == ("0", "1", "2", "3", "4", "GPU-00000006", "GPU-00000007")
    assert (found.accelerator_type, parse_workers("auto", found)) == ("H100", 7)


def test_a_node_whose_named_gpus_are_all_lost_does_not_become_a_cpu_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, {2, 3}, count=4)
    assert find_devices("1,0").entries == ("1", "0")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='2,3' names GPUs"):
        find_devices("2,3")
    plant(monkeypatch, set(range(8)))
    assert find_devices().entries == ()
    with pytest.raises(ConfigError, match="can open none of 8"):
        find_devices("0")


def test_numbers_count_what_may_be_opened_as_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's ConstrainDevices: a job has the last GPUs of eight, and they are its 0 and 1."""
    plant(monkeypatch, set(range(6)))
    assert find_devices("0,1").entries == ("0", "1")
    assert find_devices().entries == ("GPU-00000006", "GPU-00000007")


def test_numbers_mean_what_they_were_counted_by() -> None:
    env = worker_env({"CUDA_VISIBLE_DEVICES": "3,1"}, Devices(("3", "1")), 2)
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
