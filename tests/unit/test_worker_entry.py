"""Entry points: what is found wrong before a group forms, and what each call begins with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.core.facts import Entry, EntryKind
from elastic.errors import UsageError
from elastic.train.torch import TorchTrainer
from elastic.wire.codec_jobs import submit_request
from elastic.worker.process import entry
from tests.patience import DEADLINE_S


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    path, argv, directory = list(sys.path), list(sys.argv), os.getcwd()
    main = sys.modules["__main__"]
    yield
    sys.path[:], sys.argv[:] = path, argv
    sys.modules["__main__"] = main
    os.chdir(directory)


def function_entry(function: Callable[..., Any], config: Any = None, **options: Any) -> Entry:
    payload = entry.pack(function, config, options).payload
    return Entry(EntryKind.FUNCTION, "train", payload=payload)


def test_a_function_with_two_arguments_is_refused() -> None:
    def train(config: Any, model: Any) -> None: ...

    with pytest.raises(UsageError, match="config, model"):
        entry.load(function_entry(train))().run()


def test_classes_of_the_drivers_script_are_pickled_by_name_in_a_worker() -> None:
    script = """
import pickle
class Sample:
    number = 7
def train():
    return pickle.loads(pickle.dumps(Sample())).number
"""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": "/nowhere/train.py"}
    exec(script, names)
    call = entry.load(function_entry(names["train"]))()
    assert call.run() == 7
    assert not hasattr(sys.modules["__main__"], "__file__")


def test_processes_that_are_spawned_know_the_drivers_script_and_do_not_run_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "train.py"
    file.write_text("raise RuntimeError('a script without a guard')")
    script = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
def square(number):
    return number * number
def in_another(function, number):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, number).result()
def in_its_child(number):
    return in_another(square, number)
def train():
    return in_another(in_its_child, 3)
"""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(file)}
    exec(script, names)
    assert entry.load(function_entry(names["train"]))().run() == 9


def test_what_cannot_be_pickled_is_refused_with_what_to_do() -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(UsageError, match="inside the function"):
        entry.pack(lambda: lock, None, {})


def test_a_payload_of_something_else_is_refused() -> None:
    import cloudpickle

    packed = cloudpickle.dumps([]) + cloudpickle.dumps((7, None, {}))
    wrong = Entry(EntryKind.FUNCTION, "f", payload=packed)
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


# ---------------------------------------------------------------- as in a process of its own


def script_of(folder: Path, text: str, **modules: str) -> Path:
    for name, content in modules.items():
        (folder / f"{name}.py").write_text(content)
    script = folder / "train.py"
    script.write_text(text)
    return script


def test_installed_packages_are_imported_ahead_unless_that_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "slow_to_import.py").write_text("")
    monkeypatch.syspath_prepend(str(installed))
    script = script_of(tmp_path, '"""Text."""\nimport slow_to_import\n')
    job = Entry(EntryKind.SCRIPT, str(script))
    entry.load(job, imports_ahead=False)
    assert "slow_to_import" not in sys.modules
    entry.load(job)
    assert sys.modules.pop("slow_to_import")


def test_modules_that_are_not_installed_are_imported_by_the_script_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they are: they may read its arguments."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "reads_arguments.py").write_text("import sys\nNAMES = sys.argv[1:]\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    folder = tmp_path / "scripts"
    folder.mkdir()
    out = folder / "out"
    text = "import reads_arguments, pathlib\n"
    text += "pathlib.Path(reads_arguments.NAMES[0]).write_text('')\n"
    entry.load(Entry(EntryKind.SCRIPT, str(script_of(folder, text)), args=(str(out),)))().run()
    assert out.exists()
    del sys.modules["reads_arguments"]


def test_modules_of_a_function_read_the_arguments_of_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "also_reads_arguments.py").write_text("import sys\nNAMES = sys.argv[1:]\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def function() -> list[str]:
        import also_reads_arguments  # type: ignore[import-not-found]

        return list(also_reads_arguments.NAMES)

    monkeypatch.setattr(sys, "argv", ["train.py", "--key", "\udcff"])  # A byte that is no UTF-8.
    spec = TorchTrainer(function)._spec("run")
    submit_request(spec)
    job = spec.entry
    assert not job.args  # Everyone sees these.
    monkeypatch.setattr(sys, "argv", ["worker", "--of-our-own"])
    assert entry.load(job)().run() == ["--key", "\udcff"]
    del sys.modules["also_reads_arguments"]


ENDS = """
import atexit, pathlib, pickle, sys, threading
from concurrent.futures import ThreadPoolExecutor

gate, folder = threading.Event(), pathlib.Path(sys.argv[1])

class Config:
    pass

def late(name):
    gate.wait(60)
    pickle.dumps(Config())  # Which looks for it in `__main__`.
    (folder / name).write_text("")

executor = ThreadPoolExecutor(1)
executor.submit(late, "first")
executor.submit(late, "second")
threading.Thread(target=late, args=("thread",)).start()
atexit.register((folder / "atexit").write_text, "")
threading.Timer(0.1, gate.set).start()
sys.exit(0)
"""
RUNS = """
import contextlib, sys
from elastic.core.facts import Entry, EntryKind
from elastic.worker.process import entry
script, out = sys.argv[1:]
with contextlib.suppress(SystemExit):
    entry.load(Entry(EntryKind.SCRIPT, script, args=(out,)))().run()
entry.end_script()
import os, pathlib
print(*sorted(one.name for one in pathlib.Path(out).iterdir()), flush=True)
os._exit(0)
"""


def test_a_script_has_ended_when_its_threads_and_what_it_registered_have(tmp_path: Path) -> None:
    script, out = script_of(tmp_path, ENDS), tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(script), str(out)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["atexit", "first", "second", "thread"], done.stderr


def test_only_a_script_that_imports_this_library_is_known_to_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_foreign(text: str) -> bool:
        job = Entry(EntryKind.SCRIPT, str(script_of(tmp_path, text)))
        return entry.load(job, imports_ahead=False)().is_foreign

    assert is_foreign("from torch.distributed.elastic.multiprocessing.errors import record\n")
    assert not is_foreign("from elastic import train\n")
    assert not is_foreign("if True:\n    import torch, elastic.train as train\n")
    for name, text in (
        ("first.py", "def main():\n    import second\n"),
        ("second.py", "import json, loop.step as step\n"),
        ("loop/__init__.py", "import torch\n"),
        ("loop/step.py", "import elastic\n"),
        ("package/__init__.py", ""),
        ("package/run.py", "from .deep import step\n"),
        ("package/deep/__init__.py", ""),
        ("package/deep/step.py", "import elastic\n"),
        ("alone/__init__.py", ""),
        ("alone/run.py", "import torch, json\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "loop" / ".#lock.py").symlink_to("gone")
    assert not is_foreign("from first import main\n")
    monkeypatch.syspath_prepend(tmp_path)
    modules = {"second": False, "loop": False, "package.run": False, "alone.run": True}
    for name, is_known in modules.items():
        call = entry.load(Entry(EntryKind.MODULE, name))()
        assert call.is_foreign is is_known, name
    assert "loop" not in sys.modules


def test_a_script_that_is_left_early_leaves_no_globals_behind(tmp_path: Path) -> None:
    before = sys.modules["__main__"]
    script = script_of(tmp_path, "raise ValueError('left')\n")
    with pytest.raises(ValueError, match="left"):
        entry.load(Entry(EntryKind.SCRIPT, str(script)))().run()
    assert sys.modules["__main__"] is before


def test_a_script_that_exits_with_a_code_has_failed(tmp_path: Path) -> None:
    script = script_of(tmp_path, "raise SystemExit(3)\n")
    with pytest.raises(SystemExit, match="3"):
        entry.load(Entry(EntryKind.SCRIPT, str(script)))().run()
