"""Which sources of notices a node watches, and how long a notice leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.agent.notices.choosing import AZURE_TAG, choose_sources, find_names
from elastic.agent.notices.metadata import MetadataEndpoint
from elastic.agent.notices.source import CEILING_S, FLOOR_S, Notice, time_left_s
from elastic.errors import ConfigError


def firmware(tmp_path: Path, **words: str) -> Path:
    for name, word in words.items():
        (tmp_path / name).write_text(f"{word}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "env", "names"),
    [
        ({}, {}, []),
        ({"sys_vendor": "QEMU", "product_name": "Standard PC"}, {}, []),
        ({"sys_vendor": "Amazon EC2"}, {}, ["aws"]),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, {}, ["aws"]),
        ({"sys_vendor": "Google"}, {}, ["gcp"]),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": AZURE_TAG}, {}, ["azure"]),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "laptop"}, {}, []),
        ({}, {"SLURM_JOB_ID": "7"}, ["slurm"]),
        ({"sys_vendor": "Google"}, {"SLURM_JOB_ID": "7"}, ["gcp", "slurm"]),
    ],
)
def test_a_machine_says_itself_which_sources_it_has(
    tmp_path: Path, words: dict[str, str], env: dict[str, str], names: list[str]
) -> None:
    dmi = firmware(tmp_path, **words)
    assert find_names(env, dmi) == names
    assert [source.name for source in choose_sources("auto", env, dmi)] == names


def test_sources_are_taken_in_their_order_and_each_once(tmp_path: Path) -> None:
    dmi = firmware(tmp_path, sys_vendor="Google")
    chosen = choose_sources("gcp,auto, file:/run/notice,gcp,kubernetes:/etc/notes", {}, dmi)
    assert [source.name for source in chosen] == [
        "gcp", "file:/run/notice", "kubernetes:/etc/notes",
    ]  # fmt: skip


def test_none_is_none() -> None:
    assert choose_sources("none", {"SLURM_JOB_ID": "7"}) == ()


@pytest.mark.parametrize("text", ["azur", "file", "file:", "aws:80", "none,aws", "kubernetes"])
def test_what_is_no_source_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--notices"):
        choose_sources(text, {})


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("", MetadataEndpoint("10.1.1.1")),
        ("127.0.0.1:8080", MetadataEndpoint("127.0.0.1", 8080)),
        ("http://[fd00:ec2::254]", MetadataEndpoint("fd00:ec2::254")),
        ("http://metadata:70000", MetadataEndpoint("10.1.1.1")),
        ("http://", MetadataEndpoint("10.1.1.1")),
    ],
)
def test_the_address_of_a_metadata_server_is_the_given_one_or_the_known_one(
    text: str, endpoint: MetadataEndpoint
) -> None:
    assert MetadataEndpoint.parse(text, "10.1.1.1") == endpoint


@pytest.mark.parametrize(
    ("notice", "left_s"),
    [
        (Notice("no time"), 30.0),
        (Notice("so many seconds", within_s=12.0), 12.0),
        (Notice("now", within_s=0.0), 0.0),
        (Notice("a moment", deadline_unix_s=1120.0), 120.0),
        (Notice("a clock that is off", deadline_unix_s=900.0), FLOOR_S),
        (Notice("the far future", deadline_unix_s=1e12), CEILING_S),
    ],
)
def test_a_notice_leaves_the_time_that_it_says(notice: Notice, left_s: float) -> None:
    assert time_left_s(notice, now_unix_s=1000.0, default_s=30.0) == left_s
