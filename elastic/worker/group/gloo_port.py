"""gloo's listener on a port of a given range, which gloo itself has no option for.

gloo binds to port 0, and the kernel's range is the whole machine's. So while a device is made,
torch's library calls a function of ours in place of the C library's `bind`: its entry in the table
of external functions (ELF's PLTGOT) is replaced, and put back.

Rule: only where a range was asked for. A library that is laid out differently is an error, never a
port elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import re
import struct
from collections.abc import Iterator
from functools import cache

from elastic.errors import GroupError
from elastic.runtime.worker_ports import PortRange, all_taken

LIBRARY = "libtorch_cpu.so"
CANNOT = "so gloo's port cannot be chosen (--worker-ports)"
MAPPING = re.compile(r"^([0-9a-f]+)-\S+ \S+ 0+ \S+ \S+ +(/.*)$")
"""A line of /proc/self/maps for the beginning of a file."""
ELF_BYTES = 64
PROGRAM_HEADERS_AT, PROGRAM_HEADER_COUNT_AT = 32, 56
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
PT_LOAD, PT_DYNAMIC = 1, 2
DYNAMIC = struct.Struct("<qQ")
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_JMPREL = 2, 5, 6, 10, 23
RELOCATION = struct.Struct("<QQq")
SYMBOL = struct.Struct("<IBBHQQ")
PORT = struct.Struct(">H")
PORT_AT = 2
"""In `struct sockaddr_in` and `sockaddr_in6`."""
BIND = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
)


@contextlib.contextmanager
def binding_within(ports: PortRange) -> Iterator[None]:
    """Give sockets that torch binds to any port, meanwhile, a free one of this range.

    Raises:
        GroupError: torch's library is not as expected.
        OSError: all ports of the range are in use.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    errors: list[int] = []

    def bind(descriptor: int, address: int, size: int) -> int:
        wanted = bytearray(ctypes.string_at(address, size))
        (given,) = PORT.unpack_from(wanted, PORT_AT)
        failed = -1
        for port in [given] if given else ports:
            PORT.pack_into(wanted, PORT_AT, port)
            failed = libc.bind(descriptor, bytes(wanted), size)
            if not failed or ctypes.get_errno() != errno.EADDRINUSE:
                break
        errors.append(ctypes.get_errno() if failed else 0)
        return int(failed)

    ours = BIND(bind)
    slot = ctypes.c_void_p.from_address(find_bind())
    before, slot.value = slot.value, ctypes.cast(ours, ctypes.c_void_p).value
    try:
        yield
    except RuntimeError as error:
        if errno.EADDRINUSE in errors:
            # gloo's own error is that it does not know the address.
            raise all_taken(ports) from error
        raise
    finally:
        slot.value = before
    if not errors:
        raise GroupError(f"{LIBRARY} has not bound anything, {CANNOT}")


@cache
def find_bind() -> int:
    """Return the address of the table's entry for `bind`; it can be written to.

    Takes 20 ms the first time, which a process that was forked later need not spend. GroupError
    if there is none.
    """
    base, (at, size) = _library()
    fields = dict(DYNAMIC.iter_unpack(ctypes.string_at(base + at, size)))
    if DT_JMPREL not in fields:
        raise GroupError(f"{LIBRARY} has no table of functions, {CANNOT}")

    def table(tag: int, size: int) -> bytes:
        # On some machines the loader has added the base to these addresses.
        address = fields[tag] if fields[tag] >= base else base + fields[tag]
        return ctypes.string_at(address, size)

    names = table(DT_STRTAB, fields[DT_STRSZ])
    wanted = {one.start() for one in re.finditer(rb"bind\0", names)}
    entries = {
        info >> 32: offset
        for offset, info, _ in RELOCATION.iter_unpack(table(DT_JMPREL, fields[DT_PLTRELSZ]))
    }
    symbols = table(DT_SYMTAB, SYMBOL.size * (max(entries, default=0) + 1))
    for number, offset in entries.items():
        if SYMBOL.unpack_from(symbols, number * SYMBOL.size)[0] in wanted:
            _make_writable(base + offset)
            return base + offset
    raise GroupError(f"{LIBRARY} does not call bind through a table, {CANNOT}")


def _library() -> tuple[int, tuple[int, int]]:
    """Return where the library begins in memory, and address and size of its dynamic section."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        found = [one for line in lines if (one := MAPPING.match(line)) and LIBRARY in one[2]]
    if not found:
        raise GroupError(f"this process has not loaded {LIBRARY}, {CANNOT}")
    with open(found[0][2], "rb") as file:
        head = file.read(ELF_BYTES)
        (at,) = struct.unpack_from("<Q", head, PROGRAM_HEADERS_AT)
        (count,) = struct.unpack_from("<H", head, PROGRAM_HEADER_COUNT_AT)
        file.seek(at)
        headers = [*PROGRAM_HEADER.iter_unpack(file.read(count * PROGRAM_HEADER.size))]
    base = int(found[0][1], 16)
    for kind, _, offset, address, *_ in headers:
        if kind == PT_LOAD and offset == 0:
            base -= address
    for kind, _, _, address, _, size, *_ in headers:
        if kind == PT_DYNAMIC:
            return base, (address, size)
    raise GroupError(f"{LIBRARY} has no dynamic section, {CANNOT}")


def _make_writable(address: int) -> None:
    """Let this process write to a page of the table, which some linkers protect."""
    page = address - address % mmap.PAGESIZE
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
        raise GroupError(f"the table of {LIBRARY} cannot be written to, {CANNOT}")
