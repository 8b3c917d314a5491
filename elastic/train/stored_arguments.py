"""Arguments of a trainer or tuner, pickled in its directory for `restore`: the only pickle there.

Rule: a trainer's is read only by `restore` without a train function, a tuner's by every `restore`.
Unpickling runs code: a user who can write the file can run code in the process that restores.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cloudpickle

from elastic.errors import UsageError
from elastic.storage.files import Files

log = logging.getLogger(__name__)

MAGIC = b"ELTRNR1\n"
HEADER = struct.Struct(">8sI")
"""Header before the pickle: magic and CRC-32."""


def pack_arguments(parts: Mapping[str, Any]) -> bytes:
    """Return the content of the file, b"" if something in the arguments cannot be pickled.

    Callbacks that cannot be pickled are left out.
    """
    bare = {**parts, "run_config": replace(parts["run_config"], callbacks=())}
    for attempt in (parts, bare):
        try:
            pickled = bytes(cloudpickle.dumps(dict(attempt)))
            return HEADER.pack(MAGIC, zlib.crc32(pickled)) + pickled
        except Exception as error:
            problem = error
    # A run in this process needs no pickle, so this is no reason to refuse it.
    log.info("arguments_not_stored reason=%r", str(problem))
    return b""


def read_arguments(
    files: Files, name: str, where: str, *, missing: str, instead: str
) -> dict[str, Any]:
    """Return arguments by name; unpickling runs code.

    Args:
        files: of the run or study.
        name: of the file.
        where: the call, for errors, as are the next two.
        missing: why there may be no such file.
        instead: what to do.

    Raises:
        UsageError: there is no such file, or it cannot be read here.
        StorageError: the directory cannot be read.
    """
    data = files.read_if_there(name)
    if data is None:
        raise UsageError(
            f"{where}: nothing is stored there ({name} is missing: {missing}); {instead}"
        )
    magic, crc32 = HEADER.unpack(data[: HEADER.size].ljust(HEADER.size, b"\0"))
    if magic != MAGIC or crc32 != zlib.crc32(data[HEADER.size :]):
        what = "damaged" if magic == MAGIC else "of another version, or damaged"
        raise UsageError(f"{where}: {name} is {what}, and was not read; {instead}")
    try:
        return dict(cloudpickle.loads(data[HEADER.size :]))
    except Exception as error:
        raise UsageError(
            f"{where}: {name} cannot be unpickled here ({type(error).__name__}: {error}); {instead}"
        ) from error
