"""Disables torch's needless DNS look-ups while a group forms.

Rule: only for threads of our own, made for one call. torch's TCPStore client resolves the name of
the address that it has just connected to (`::ffff:10.0.0.7`, which no hosts file lists), for its
log. A slow or missing DNS server would delay each new group by 5 s and more.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)


class _ResolverState(ctypes.Structure):
    """The beginning of glibc's `struct __res_state` (<resolv.h>), which is stable."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    )


def forget_name_servers() -> None:
    """Make DNS look-ups of the calling thread fail at once; the hosts file still answers.

    glibc has one resolver state for each thread. Without glibc nothing happens. torch logs once
    per process that it could not resolve a name, and prints the address.
    """
    libc = ctypes.CDLL(None)
    try:
        state_of_thread, init = libc.__res_state, libc.__res_init
    except AttributeError:
        log.debug("resolver_unchanged: this C library is not glibc")
        return
    state_of_thread.restype = ctypes.POINTER(_ResolverState)
    if init() == 0:
        state_of_thread().contents.nscount = 0
