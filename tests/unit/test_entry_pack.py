"""Functions that travel to workers keep the names of their files: tracebacks show their lines."""

from __future__ import annotations

import pickle
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
    function, config, options = pickle.loads(pack(made(), {"lr": 1}, {"a": "<dynamic-code>"}))
    assert (config, options) == ({"lr": 1}, {"a": "<dynamic-code>"})
    try:
        function()
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
    assert {frame.filename for frame in frames} == {__file__}
    assert frames[-1].line == 'raise ValueError("in here")'
