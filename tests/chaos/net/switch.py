"""A network of our own: namespaces with addresses, and a switch that loses what it is told to.

Each host is a network namespace whose only device is a TUN; the switch reads the packets of all of
them and passes them on, later, not at all, or one way only. This kernel needs no module for that.

Rule: everything is named after this process, and gone with it.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from dataclasses import dataclass, field

from tests.patience import DEADLINE_S

TUNSETIFF = 0x400454CA
TUN_WITHOUT_HEADER = 0x1001
PACKET_BYTES_MAX = 65_535
NET = "10.77.0"


@dataclass(frozen=True)
class Link:
    """What happens to packets one way.

    Attributes:
        loss: part of them that is lost, 0 to 1.
        delay_s: how late the others come.
    """

    loss: float = 0.0
    delay_s: float = 0.0


CUT = Link(loss=1.0)


@dataclass
class Host:
    """A namespace with an address; `name` is for people."""

    name: str
    address: str
    namespace: str
    tun: int


@dataclass
class Switch:
    """All hosts, and what happens between them."""

    hosts: dict[str, Host] = field(default_factory=dict)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    passed: int = 0

    def __post_init__(self) -> None:
        """Begin with no host, and carry packets from now on."""
        self._by_address: dict[bytes, Host] = {}
        self._late: list[tuple[float, int, Host, bytes]] = []
        self._random = random.Random(1)
        self._selector = selectors.DefaultSelector()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def add(self, name: str) -> Host:
        """Make a host; the one named "user" is the namespace that this process is in."""
        number = len(self.hosts) + 1
        address, device = f"{NET}.{number}", f"el{number}"
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", device.encode(), TUN_WITHOUT_HEADER))
        namespace = "" if name == "user" else f"elastic-{os.getpid()}-{name}"
        inside: tuple[str, ...] = ()
        if namespace:
            ip("netns", "add", namespace)
            ip("link", "set", device, "netns", namespace)
            inside = ("-n", namespace)
        ip(*inside, "addr", "add", f"{address}/24", "dev", device)
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "link", "set", device, "up")
        host = Host(name, address, namespace, tun)
        self.hosts[name] = host
        self._by_address[bytes(int(part) for part in address.split("."))] = host
        self._selector.register(tun, selectors.EVENT_READ, host)
        return host

    def set(self, one: str, other: str, link: Link, *, one_way: bool = False) -> None:
        """Say what happens between two hosts from now on; "*" is everybody."""
        ones = list(self.hosts) if one == "*" else [one]
        others = list(self.hosts) if other == "*" else [other]
        for first in ones:
            for second in others:
                if first == second:
                    continue
                self.links[first, second] = link
                if not one_way:
                    self.links[second, first] = link

    def heal(self) -> None:
        """Everything passes again."""
        self.links = {}

    def close(self) -> None:
        """End; the namespaces are gone."""
        self._over.set()
        self._thread.join(DEADLINE_S)
        for host in self.hosts.values():
            os.close(host.tun)
            if host.namespace:
                ip("netns", "del", host.namespace, check=False)

    def received(self, packet: bytes) -> None:
        """Somebody may read a packet that passes; by default nobody does."""

    def _carry(self) -> None:
        while not self._over.is_set():
            wait_s = 0.2
            if self._late:
                wait_s = max(0.0, min(wait_s, self._late[0][0] - time.monotonic()))
            if not self._selector.get_map():
                self._over.wait(wait_s)
                continue
            for key, _ in self._selector.select(wait_s):
                self._read(key.data)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(self._late)
                write(target, packet)

    def _read(self, source: Host) -> None:
        for _ in range(64):
            try:
                packet = os.read(source.tun, PACKET_BYTES_MAX)
            except OSError:
                return
            target = self._by_address.get(packet[16:20])
            if target is None:
                continue
            link = self.links.get((source.name, target.name), Link())
            if link.loss and self._random.random() < link.loss:
                continue
            self.passed += 1
            self.received(packet)
            if link.delay_s:
                due = time.monotonic() + link.delay_s
                heapq.heappush(self._late, (due, self.passed, target, packet))
            else:
                write(target, packet)


def write(target: Host, packet: bytes) -> None:
    """Hand a packet to a host; one that has no room loses it, as networks do."""
    try:
        os.write(target.tun, packet)
    except OSError:
        return


def ip(*args: str, check: bool = True) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *args], check=check, capture_output=True)
