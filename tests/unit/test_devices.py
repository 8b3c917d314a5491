"""What an agent says its machine has: names, visibility, amounts, and every refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.agent.devices import (
    Devices,
    Gpu,
    choose_devices,
    find_devices,
    memory_gb,
    node_resources,
    normalise_name,
    num_processors,
    parse_labels,
    parse_resources,
    parse_workers,
    read_nvml,
    type_of,
    worker_env,
)
from elastic.core.config import KNOWN_ACCELERATORS
from elastic.errors import ConfigError
from elastic.runtime import cgroup

H100S = tuple(Gpu(i, f"GPU-{i}aaa-bbbb", "NVIDIA H100 80GB HBM3") for i in range(4))
FOUR = Devices(("0", "1", "2", "3"), "H100", "4 found by NVML")
NONE = Devices(reason="no GPUs: NVML counts none")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe MIG 1g.10gb", "A100"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX4090"),
        ("NVIDIA TITAN Xp", "TITANXP"),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX1080TI"),
        ("NVIDIA Graphics Device", ""),
        ("", ""),
    ],
)
def test_product_names_become_accelerator_types(name: str, expected: str) -> None:
    assert normalise_name(name) == expected


def test_every_known_accelerator_is_its_own_type() -> None:
    assert [normalise_name(f"NVIDIA {name} 80GB") for name in KNOWN_ACCELERATORS] == list(
        KNOWN_ACCELERATORS
    )


@pytest.mark.parametrize(
    ("visible", "entries"),
    [
        (None, ("0", "1", "2", "3")),
        ("0,1,2,3", ("0", "1", "2", "3")),
        ("2,0", ("2", "0")),
        (" 1 , 3 ", ("1", "3")),
        ("GPU-1aaa-bbbb,GPU-3", ("GPU-1aaa-bbbb", "GPU-3")),
        ("MIG-3aaa", ("MIG-3aaa",)),
        # CUDA stops at the first entry that names nothing, and so do we.
        ("1,9,2", ("1",)),
        ("1,-1,2", ("1",)),
        ("1,1,2", ("1",)),
        ("nonsense", ()),
    ],
)
def test_visible_devices_are_kept_as_cuda_reads_them(
    visible: str | None, entries: tuple[str, ...]
) -> None:
    found = choose_devices(H100S, visible)
    assert found.entries == entries
    assert found.accelerator_type == ("H100" if entries else "")


@pytest.mark.parametrize("visible", ["", " ", "-1", "NoDevFiles", "none"])
def test_hidden_devices_are_not_looked_for(visible: str) -> None:
    found = find_devices(visible)
    assert found.entries == ()
    assert "hides all GPUs" in found.reason


def test_a_mixed_node_has_the_type_of_most_of_its_gpus() -> None:
    mixed = (Gpu(0, "GPU-0", "Tesla T4"), *H100S[1:3])
    assert type_of(mixed) == "H100"
    assert type_of(mixed[:2]) == "T4"
    assert type_of(()) == ""


def test_a_machine_without_a_driver_has_no_gpus_and_says_why() -> None:
    found = read_nvml()
    if not isinstance(found, str):
        pytest.skip("this machine has GPUs")
    assert found.startswith("no GPUs: ")
    assert find_devices() == Devices(reason=found)


def test_what_is_asked_for_overrides_what_was_found() -> None:
    found = node_resources(FOUR, {}).as_dict()
    assert found == {"CPU": num_processors(), "GPU": 4, "memory_gb": memory_gb()}
    asked = node_resources(FOUR, {"GPU": 2, "CPU": 1.5, "disk": 3}).as_dict()
    assert asked == {"CPU": 1.5, "GPU": 2, "disk": 3, "memory_gb": memory_gb()}
    assert "GPU" not in node_resources(NONE, {}).as_dict()


def test_more_gpus_than_there_are_cannot_be_offered() -> None:
    with pytest.raises(ConfigError, match=r"GPU=8: this machine offers 4 \(4 found by NVML\)"):
        node_resources(FOUR, {"GPU": 8})
    with pytest.raises(ConfigError, match=r"GPU=1: this machine offers 0 \(no GPUs: NVML"):
        node_resources(NONE, {"GPU": 1})


UNLIMITED_V1 = 9223372036854771712


@pytest.mark.parametrize(
    ("name", "content", "limit_gb"),
    [
        ("memory.max", "1073741824\n", 1.0),
        ("memory.max", "max\n", None),
        ("memory.max", "", None),
        ("memory/memory.limit_in_bytes", "1073741824\n", 1.0),
        ("memory/memory.limit_in_bytes", f"{UNLIMITED_V1}\n", None),
    ],
)
def test_memory_is_what_the_container_may_use(
    tmp_path: Path, name: str, content: str, limit_gb: float | None
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    assert memory_gb(tmp_path) == (limit_gb or memory_gb(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("limit", "used", "account", "dropped"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ],
)
def test_what_is_left_of_a_containers_memory(
    tmp_path: Path, limit: str, used: str, account: str, dropped: str
) -> None:
    assert cgroup.memory_left(tmp_path) is None
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / used).write_text("300\n")
    assert cgroup.memory_left(tmp_path) == 700
    (tmp_path / account).write_text(f"anon 90\n{dropped} 150\n{dropped.replace('in', '')} 50\n")
    assert cgroup.memory_left(tmp_path) == 900, "files that were read make room"
    (tmp_path / account).unlink()
    (tmp_path / used).write_text("1300\n")
    assert cgroup.memory_left(tmp_path) == 0


@pytest.mark.parametrize(
    ("text", "amounts"),
    [
        ("", {}),
        ("auto", {}),
        ("GPU=8,CPU=32", {"GPU": 8, "CPU": 32}),
        (" GPU = 0.5 ,", {"GPU": 0.5}),
    ],
)
def test_resources_are_read(text: str, amounts: dict[str, float]) -> None:
    assert parse_resources(text) == amounts


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("GPU", "'GPU': expected name=value"),
        ("=3", "'=3': expected name=value"),
        ("GPU=many", "GPU=many: expected a number"),
        ("GPU=-1", "GPU=-1.0: expected a finite number >= 0"),
        ("GPU=nan", "expected a finite number"),
        ("GPU=inf", "expected a finite number"),
        ("GPU=1,GPU=2", "GPU is given twice"),
    ],
)
def test_resources_that_make_no_sense_are_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_resources(text)


def test_labels_are_sorted_pairs() -> None:
    assert parse_labels("zone=b,disk=ssd,empty=") == (("disk", "ssd"), ("empty", ""), ("zone", "b"))
    assert parse_labels("") == ()
    with pytest.raises(ConfigError, match="--labels 'zone': expected"):
        parse_labels("zone")


def test_workers_are_counted_by_gpus_or_given() -> None:
    assert parse_workers("auto", FOUR) == 4
    assert parse_workers("auto", NONE) == 1
    assert parse_workers("3", NONE) == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "1.5"])
def test_a_number_of_workers_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected auto, or a number of at least 1"):
        parse_workers(text, NONE)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.0),
    ],
)
def test_a_containers_share_of_processors_is_what_it_has(
    tmp_path: Path, files: dict[str, str], limit: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup.cpu_limit(tmp_path) == limit
    env = worker_env({}, Devices(()), 1, tmp_path)
    assert env.get("OMP_NUM_THREADS") == (None if limit is None else "1")
    everything = num_processors(tmp_path / "absent")
    assert num_processors(tmp_path) == (everything if limit is None else 1)


def test_what_a_user_set_for_workers_stays(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert worker_env({"OMP_NUM_THREADS": "7"}, Devices(()), 1, tmp_path)["OMP_NUM_THREADS"] == "7"
    assert worker_env({}, Devices(()), 2, tmp_path)["OMP_NUM_THREADS"] == "1"
    for given, used in ({}, "0"), ({"PYTHONHASHSEED": "random"}, "random"):
        assert worker_env(given, Devices(()), 1, tmp_path)["PYTHONHASHSEED"] == used
    assert "TORCH_CPP_LOG_LEVEL" not in worker_env(
        {"TORCH_DISTRIBUTED_DEBUG": "INFO"}, Devices(()), 2, tmp_path
    )


def test_the_tightest_of_the_groups_that_a_process_is_in_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SLURM step or a systemd unit has its limit far below the root."""
    member = tmp_path / "self"
    monkeypatch.setattr(cgroup, "MEMBERSHIP", member)
    member.write_text("0::/system.slice/job_7/step_0\n")
    step = tmp_path / "system.slice" / "job_7" / "step_0"
    step.mkdir(parents=True)
    (step / "memory.max").write_text("max\n")
    (step.parent / "memory.max").write_text("1000\n")
    (step.parent / "memory.current").write_text("400\n")
    (step.parents[1] / "memory.max").write_text("5000\n")
    (step.parents[1] / "memory.current").write_text("4900\n")
    (step / "cpu.max").write_text("150000 100000\n")
    assert cgroup.memory_limit(tmp_path) == 1000
    assert cgroup.memory_left(tmp_path) == 100, "others use up what is above"
    assert cgroup.cpu_limit(tmp_path) == 1.5
    member.write_text("5:cpu,cpuacct:/gone\n4:memory:/slurm/job_7\n")
    (tmp_path / "memory" / "slurm" / "job_7").mkdir(parents=True)
    (tmp_path / "memory" / "slurm" / "job_7" / "memory.limit_in_bytes").write_text("70\n")
    assert cgroup.memory_limit(tmp_path) == 70
    assert cgroup.cpu_limit(tmp_path) is None
