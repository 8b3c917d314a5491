"""Entry points: what is found wrong before a group forms, and what each call begins with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.core.world import Entry, EntryKind
from elastic.errors import UsageError
from elastic.worker import entry


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    path, argv, directory = list(sys.path), list(sys.argv), os.getcwd()
    yield
    sys.path[:], sys.argv[:] = path, argv
    os.chdir(directory)


def function_entry(function: Callable[..., Any], config: Any = None, **options: Any) -> Entry:
    payload = entry.pack(function, config, options)
    return Entry(EntryKind.FUNCTION, "train", payload=payload)


def test_a_function_gets_a_config_of_its_own_each_time() -> None:
    def train(config: dict[str, int]) -> int:
        config["lr"] += 1
        return config["lr"]

    prepare = entry.load(function_entry(train, {"lr": 1}))
    assert [prepare().run(), prepare().run()] == [2, 2]


def test_config_and_options_are_known_before_the_call() -> None:
    call = entry.load(function_entry(lambda: None, {"lr": 1}, epochs=3))()
    assert (call.config, call.options) == ({"lr": 1}, {"epochs": 3})


@pytest.mark.parametrize(
    ("function", "config", "result"),
    [
        (lambda: "none", {"lr": 1}, "none"),
        (lambda config: config, {"lr": 1}, {"lr": 1}),
        (lambda config: config, None, {}),
        (lambda config, flag=True: flag, {}, True),
        (lambda *args: len(args), {}, 1),
    ],
)
def test_a_function_is_called_with_what_it_takes(
    function: Callable[..., Any], config: Any, result: Any
) -> None:
    assert entry.load(function_entry(function, config))().run() == result


def test_a_function_with_two_arguments_is_refused() -> None:
    def train(config: Any, model: Any) -> None: ...

    with pytest.raises(UsageError, match="config, model"):
        entry.load(function_entry(train))().run()


def test_what_cannot_be_pickled_is_refused_with_what_to_do() -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(UsageError, match="inside the function"):
        entry.pack(lambda: lock, None, {})


def test_a_payload_of_something_else_is_refused() -> None:
    import cloudpickle

    wrong = Entry(EntryKind.FUNCTION, "f", payload=cloudpickle.dumps((7, None, {})))
    with pytest.raises(UsageError, match="is a int"):
        entry.load(wrong)


def test_a_script_runs_as_main_with_its_arguments_and_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_script.py").write_text("value = 41\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, pathlib, neighbour_of_script\n"
        "assert __name__ == '__main__'\n"
        "pathlib.Path(sys.argv[1]).write_text(str(neighbour_of_script.value) + sys.argv[2])\n"
    )
    out = tmp_path / "out"
    prepare = entry.load(Entry(EntryKind.SCRIPT, str(script), args=(str(out), "x")))
    for _ in range(2):
        out.unlink(missing_ok=True)
        assert prepare().run() is None
        assert out.read_text() == "41x"


def test_a_script_is_looked_for_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    entry.load(Entry(EntryKind.SCRIPT, "train.py", working_dir=str(tmp_path)))().run()


def test_a_module_runs_as_main(tmp_path: Path) -> None:
    (tmp_path / "module_to_run.py").write_text(
        "import sys, pathlib\n"
        "assert __name__ == '__main__'\n"
        "pathlib.Path(sys.argv[1]).write_text('ran')\n"
    )
    out = tmp_path / "out"
    job = Entry(EntryKind.MODULE, "module_to_run", args=(str(out),), python_path=(str(tmp_path),))
    entry.load(job)().run()
    assert out.read_text() == "ran"


@pytest.mark.parametrize(
    ("job", "names"),
    [
        (Entry(EntryKind.SCRIPT, "/not/there.py"), "/not/there.py"),
        (Entry(EntryKind.SCRIPT, "/tmp"), "script /tmp"),
        (Entry(EntryKind.SCRIPT, "x.py", working_dir="/not/there"), "/not/there"),
        (Entry(EntryKind.MODULE, "not_there_at_all"), "not_there_at_all"),
        (Entry(EntryKind.MODULE, "not_there.at_all"), "not_there.at_all"),
    ],
)
def test_what_is_not_on_this_node_is_refused_by_name(job: Entry, names: str) -> None:
    with pytest.raises(UsageError, match=names):
        entry.load(job)
