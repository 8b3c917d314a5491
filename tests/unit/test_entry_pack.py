"""Functions that travel to workers keep the names of their files: tracebacks show their lines."""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from typing import Any

from elastic.worker.process.entry import pack


def made() -> Any:
    def fails() -> None:
        def inner() -> None:
            raise ValueError("in here")

        inner()

    return fails


def test_a_traceback_of_a_function_that_was_sent_names_file_and_line() -> None:
    packed = io.BytesIO(pack(made(), {"lr": 1}, {"a": "<dynamic-code>"}).payload)
    assert pickle.load(packed) == sys.argv[1:]
    function, config, options = pickle.load(packed)
    assert (config, options) == ({"lr": 1}, {"a": "<dynamic-code>"})
    try:
        function()
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
    assert {frame.filename for frame in frames} == {__file__}
    assert frames[-1].line == 'raise ValueError("in here")'
