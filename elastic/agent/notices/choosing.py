"""Chooses the sources of notices that this node watches: from the flag, or by DMI data.

Rule: detection uses no network. It reads the firmware's DMI strings and the environment, in
microseconds, so that a machine outside any cloud pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from elastic.agent.notices import aws, azure, gcp
from elastic.agent.notices.file import WatchedFile
from elastic.agent.notices.metadata import MetadataEndpoint
from elastic.agent.notices.slurm import Slurm
from elastic.agent.notices.source import NoticeSource
from elastic.errors import ConfigError

DMI = Path("/sys/class/dmi/id")
AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The asset tag of every Azure machine; other machines with Microsoft's firmware have another."""
KINDS = "auto, none, aws, aws-rebalance, gcp, azure, slurm, file:PATH, kubernetes:PATH"


def choose_sources(text: str, env: Mapping[str, str], dmi: Path = DMI) -> tuple[NoticeSource, ...]:
    """Return the sources that --notices names, each once, in its order.

    Args:
        text: such as "aws,file:/run/notice"; "auto" means all that are detected.
        env: of the agent.
        dmi: directory of the kernel's DMI strings.

    Raises:
        ConfigError: a name is unknown, or a path is missing.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if "none" in names and len(names) > 1:
        raise ConfigError(f"--notices {text!r}: none stands alone")
    found: dict[str, NoticeSource] = {}
    for name in names:
        for each in find_names(env, dmi) if name == "auto" else [name]:
            if each != "none":
                source = _source(each, env)
                found.setdefault(source.name, source)
    return tuple(found.values())


def find_names(env: Mapping[str, str], dmi: Path = DMI) -> list[str]:
    """Return the names of the sources that this machine seems to have, by DMI and environment."""
    vendor, product = _read(dmi / "sys_vendor"), _read(dmi / "product_name")
    names = []
    if "Amazon EC2" in (vendor, _read(dmi / "board_vendor")) or "amazon" in _read(
        dmi / "bios_version"
    ):
        names.append("aws")
    if vendor == "Google" or product == "Google Compute Engine":
        names.append("gcp")
    if _read(dmi / "chassis_asset_tag") == AZURE_TAG:
        names.append("azure")
    if env.get("SLURM_JOB_ID"):
        names.append("slurm")
    return names


def _source(name: str, env: Mapping[str, str]) -> NoticeSource:
    """Return one source; the clouds' own standard variables override the metadata server."""
    kind, colon, path = name.partition(":")
    if kind in ("file", "kubernetes"):
        if not path:
            raise ConfigError(f"--notices {name!r}: expected {kind}:PATH")
        return WatchedFile(Path(path).absolute(), is_annotations=kind == "kubernetes")
    if not colon and kind in ("aws", "aws-rebalance"):
        endpoint = MetadataEndpoint.parse(
            env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", ""), aws.ADDRESS
        )
        return aws.Aws(endpoint, is_rebalance=kind == "aws-rebalance")
    if not colon and kind == "gcp":
        return gcp.Gcp(MetadataEndpoint.parse(env.get("GCE_METADATA_HOST", ""), gcp.ADDRESS))
    if not colon and kind == "azure":
        return azure.Azure(MetadataEndpoint.parse("", azure.ADDRESS))
    if not colon and kind == "slurm":
        return Slurm(env.get("SLURM_JOB_ID", "?"), _moment(env.get("SLURM_JOB_END_TIME", "")))
    raise ConfigError(f"--notices {name!r}: expected some of {KINDS}")


def _moment(text: str) -> float | None:
    """Parse seconds since 1970; SLURM sets 0 or nothing for no limit."""
    return float(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
