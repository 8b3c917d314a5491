"""What others see of this machine: its name, its address, its ports; and the coordinator.

Rule: nothing is asked of anybody but the coordinator that was named, and that one registers
nothing: the stream is opened, and ended before a word is said.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from pathlib import Path

from elastic.agent.address import address_towards_any
from elastic.agent.doctor.check import Check, fail, ok, warn
from elastic.core.messages import PROTOCOL
from elastic.core.world import host_of
from elastic.errors import CoordinatorUnreachable, ElasticError
from elastic.runtime.access import Access
from elastic.runtime.rpc import is_loopback
from elastic.runtime.stream import open_stream
from elastic.wire.codec_stream import ATTACH_METHOD

SKEW_WARN_S, SKEW_FAIL_S = 1.0, 60.0
CONNECT_S = 5.0
PORTS_MIN = 10_000


def check_host_name(name: str = "") -> Check:
    """Look at what this machine's own name leads to, which gloo and NCCL bind to by default."""
    name = name or socket.gethostname()
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        fix = f"add it to /etc/hosts with this machine's address: ADDRESS {name}"
        return warn("host name", f"{name} does not resolve ({error})", fix)
    addresses = sorted({str(answer[4][0]).partition("%")[0] for answer in answers})
    found = f"{name} is {', '.join(addresses)}"
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return warn(
            "host name", found,
            f"other nodes reach nobody there: in /etc/hosts, give {name} its real address "
            "(Debian writes 127.0.1.1)",
        )  # fmt: skip
    return ok("host name", found)


def check_address(host: str, endpoints: tuple[str, ...]) -> Check:
    """Look at the address under which other nodes are to reach this one."""
    try:
        address = host or (address_towards_any(endpoints) if endpoints else "")
    except CoordinatorUnreachable as error:
        return fail("address", str(error), "check the network and the name in --coord")
    if not address:
        return ok("address", "chosen by the route to the coordinator; none was named")
    try:
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
    except OSError as error:
        fix = "name an address of this machine with --host, or leave it out"
        return fail("address", f"{address}: {error.strerror or error}", fix)
    is_local = is_loopback(address)
    is_far = any(not is_loopback(host_of(endpoint)) for endpoint in endpoints)
    if is_local and is_far:
        fix = "name an address that other nodes reach with --host"
        return fail("address", f"{address}, and the coordinator is elsewhere", fix)
    more = " (this machine only)" if is_local else ""
    return ok("address", f"{address}{more}, port {port} was free")


def check_ports(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> Check:
    """Look at the range that the system picks ports from; workers are reached at such ports."""
    try:
        low, high = (int(part) for part in path.read_text().split())
    except (OSError, ValueError):
        return ok("ports", "the system does not say which it picks")
    found = f"picked from {low} to {high}"
    if high - low < PORTS_MIN:
        fix = "widen it: sysctl net.ipv4.ip_local_port_range='32768 60999'"
        return warn("ports", found, fix)
    return ok("ports", f"{found}: open this range between the nodes")


async def check_coordinator(endpoint: str, access: Access) -> list[Check]:
    """Look whether the coordinator is there, lets this agent in, and has the same time."""
    name = f"coordinator {endpoint}"
    began = time.monotonic()
    try:
        stream = await open_stream(endpoint, ATTACH_METHOD, access=access, timeout_s=CONNECT_S)
    except ElasticError as error:
        return [fail(name, str(error), _fix_of(error))]
    try:
        took_s = time.monotonic() - began
        theirs_ns = await stream.server_time_ns()
        now_ns = time.time_ns()
    finally:
        await stream.close()
    checks = [ok(name, f"lets this agent in, protocol {PROTOCOL}, {took_s * 1e3:.0f} ms")]
    if theirs_ns is not None:
        checks.append(judge_clock((now_ns - theirs_ns) / 1e9, took_s))
    return checks


def judge_clock(ahead_s: float, took_s: float) -> Check:
    """Say what a clock that is ahead (or behind, below 0) of the coordinator's means.

    Args:
        ahead_s: ours less theirs.
        took_s: what the question took: the measurement is no better.
    """
    off_s = max(0.0, abs(ahead_s) - took_s)
    side = "ahead of" if ahead_s > 0 else "behind"
    found = f"{off_s:.1f} s {side} the coordinator's" if off_s >= SKEW_WARN_S else "agree"
    fix = "run chrony or ntpd on both machines"
    if off_s >= SKEW_FAIL_S:
        return fail("clocks", found, f"{fix}: certificates and tokens have dates")
    if off_s >= SKEW_WARN_S:
        return warn("clocks", found, f"{fix}: logs of the two cannot be compared")
    return ok("clocks", found)


def _fix_of(error: ElasticError) -> str:
    if isinstance(error, CoordinatorUnreachable):
        return "start it (elastic-coord serve), or check address, route and firewall"
    return "see the text; 'elastic-coord serve' logs each refusal too"
