"""The trainer stored in its run directory, for `TorchTrainer.restore`: the only pickle there.

Rule: it is read only by `restore` without a train function. Unpickling runs code: a user who can
write the file can run code in the process that restores.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cloudpickle

from elastic.client.attempts import TRAINER_FILE
from elastic.errors import UsageError
from elastic.storage.files import Files

log = logging.getLogger(__name__)

MAGIC = b"ELTRNR1\n"
HEADER = struct.Struct(">8sI")
"""Header before the pickle: magic and CRC-32."""


def pack_trainer(parts: Mapping[str, Any]) -> bytes:
    """Return the content of the file, b"" if the train function or its config cannot be pickled.

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
    log.info("trainer_not_stored reason=%r", str(problem))
    return b""


def read_trainer(files: Files) -> dict[str, Any]:
    """Return the arguments of a stored trainer by name; unpickling runs code."""
    where = f"TorchTrainer.restore({files.path!r})"
    pass_it = "pass the train function: TorchTrainer.restore(path, train_func, ...)"
    data = files.read_if_there(TRAINER_FILE)
    if data is None:
        raise UsageError(
            f"{where}: no trainer is stored there (it was submitted by 'elastic submit', or could "
            f"not be pickled); {pass_it}"
        )
    magic, crc32 = HEADER.unpack(data[: HEADER.size].ljust(HEADER.size, b"\0"))
    if magic != MAGIC or crc32 != zlib.crc32(data[HEADER.size :]):
        raise UsageError(f"{where}: {TRAINER_FILE} is damaged, and was not read; {pass_it}")
    try:
        return dict(cloudpickle.loads(data[HEADER.size :]))
    except Exception as error:
        raise UsageError(
            f"{where}: {TRAINER_FILE} cannot be unpickled here ({type(error).__name__}: {error}); "
            f"{pass_it}"
        ) from error
