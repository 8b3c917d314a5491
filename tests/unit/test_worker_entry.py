"""Entry points: what is found wrong before a group forms, and what each call begins with."""

from __future__ import annotations

import atexit
import builtins
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic.core.world import Entry, EntryKind
from elastic.errors import UsageError
from elastic.worker import entry
from elastic.worker.interrupt import GroupChanged


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


def test_a_function_does_not_see_our_own_flags() -> None:
    sys.argv = ["worker", "--protocol", "1"]
    assert entry.load(function_entry(lambda: len(sys.argv)))().run() == 1


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


def test_a_script_finds_itself_as_python_would_have_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        '"""Text."""\n'
        "import sys\n"
        "assert vars(sys.modules['__main__']) is globals()\n"
        "assert (__package__, __spec__, __cached__, __doc__) == (None, None, None, 'Text.')\n"
        "assert __file__ == sys.argv[0] == __loader__.get_filename('__main__')\n"
    )
    before = sys.modules["__main__"]
    entry.load(Entry(EntryKind.SCRIPT, str(script)))().run()
    assert sys.modules["__main__"] is before


def test_what_record_writes_down_has_a_file_for_each_run(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(
        "import json, os, sys\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main(): raise ValueError('bad batch')\n"
        "try: main()\n"
        "finally:\n"
        "    file = os.environ['TORCHELASTIC_ERROR_FILE']\n"
        "    with open(file) as opened: said = json.load(opened)['message']['message']\n"
        "    with open(sys.argv[1], 'a') as out: print(file, said, file=out)\n"
    )
    prepare = entry.load(Entry(EntryKind.SCRIPT, str(script), args=(str(out),)))
    for _ in range(2):
        with pytest.raises(ValueError, match="bad batch"):
            prepare().run()
    first, second = out.read_text().splitlines()
    assert first.endswith(" ValueError: bad batch")
    assert first != second
    assert not any(Path(line.split()[0]).exists() for line in (first, second))
    assert "TORCHELASTIC_ERROR_FILE" not in os.environ


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


def test_modules_of_a_script_see_the_place_that_it_runs_at_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "out"
    script = script_of(
        tmp_path,
        f"import os, pathlib, place_seen\npathlib.Path({str(out)!r}).write_text(place_seen.RANK)\n",
        place_seen="import os\nRANK = os.environ.get('RANK', 'none')\n",
    )
    prepare = entry.load(Entry(EntryKind.SCRIPT, str(script)))
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        prepare().run()
        assert out.read_text() == rank


def test_what_a_script_imports_is_run_after_what_comes_before_it(tmp_path: Path) -> None:
    (tmp_path / "vendored").mkdir()
    script = script_of(
        tmp_path,
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path / 'vendored')!r})\n"
        "from chosen_of_two import NAME\n"
        "assert NAME == 'vendored', NAME\n",
        chosen_of_two="NAME = 'beside'\n",
    )
    (tmp_path / "vendored" / "chosen_of_two.py").write_text("NAME = 'vendored'\n")
    entry.load(Entry(EntryKind.SCRIPT, str(script)))().run()


def test_a_module_that_reads_the_command_line_reads_the_scripts(tmp_path: Path) -> None:
    script = script_of(
        tmp_path,
        "import options_at_import\nassert options_at_import.FOUND == ['--lr', '3']\n",
        options_at_import="import sys\nFOUND = sys.argv[1:]\n",
    )
    entry.load(Entry(EntryKind.SCRIPT, str(script), args=("--lr", "3")))().run()


def test_a_package_is_not_run_to_find_a_module_in_it(tmp_path: Path) -> None:
    package = tmp_path / "package_with_place"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nRANK = os.environ['RANK_OF_THIS_TEST']\n")
    (package / "main.py").write_text("")
    entry.load(Entry(EntryKind.MODULE, "package_with_place.main", python_path=(str(tmp_path),)))


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


ENDS = """
import atexit, pathlib, sys, threading
from concurrent.futures import ThreadPoolExecutor

gate, folder = threading.Event(), pathlib.Path(sys.argv[1])

def late(name):
    gate.wait(60)
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
import sys
from elastic.core.world import Entry, EntryKind
from elastic.worker import entry
script, out = sys.argv[1:]
entry.load(Entry(EntryKind.SCRIPT, script, args=(out,)))().run()
import os, pathlib
print(*sorted(one.name for one in pathlib.Path(out).iterdir()), flush=True)
os._exit(0)
"""


def test_a_script_has_ended_when_its_threads_and_what_it_registered_have(tmp_path: Path) -> None:
    script, out = script_of(tmp_path, ENDS), tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(script), str(out)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["atexit", "first", "second", "thread"], done.stderr


def run_twice(folder: Path, text: str, **modules: str) -> list[str]:
    """Run a script twice in this process; returns the files that it has made."""
    out = folder / "out"
    out.mkdir()
    script = script_of(folder, text, **modules)
    prepare = entry.load(Entry(EntryKind.SCRIPT, str(script), args=(str(out),)))
    prepare().run()
    prepare().run()
    return sorted(path.name for path in out.iterdir())


def test_work_that_waits_behind_other_work_is_waited_for(tmp_path: Path) -> None:
    text = (
        "import pathlib, sys, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def save(number):\n"
        "    time.sleep(0.05)\n"
        "    (pathlib.Path(sys.argv[1]) / str(number)).write_text('')\n"
        "pool = ThreadPoolExecutor(1)\n"
        "for number in range(4):\n"
        "    pool.submit(save, number)\n"
    )
    assert run_twice(tmp_path, text) == ["0", "1", "2", "3"]


def test_a_thread_that_another_one_starts_is_waited_for(tmp_path: Path) -> None:
    text = (
        "import pathlib, sys, threading, time\n"
        "def upload():\n"
        "    time.sleep(0.1)\n"
        "    (pathlib.Path(sys.argv[1]) / 'uploaded').write_text('')\n"
        "threading.Timer(0.05, lambda: threading.Thread(target=upload).start()).start()\n"
    )
    assert run_twice(tmp_path, text) == ["uploaded"]


def test_what_an_interrupted_run_left_behind_is_not_waited_for(tmp_path: Path) -> None:
    text = (
        "import builtins, queue\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from elastic.worker.interrupt import GroupChanged\n"
        "if not hasattr(builtins, 'pool_of_this_test'):\n"
        "    builtins.pool_of_this_test = ThreadPoolExecutor(1)\n"
        "    builtins.queue_of_this_test = queue.Queue()\n"
        "    builtins.pool_of_this_test.submit(builtins.queue_of_this_test.get)\n"
        "    raise GroupChanged('lost')\n"
    )
    prepare = entry.load(Entry(EntryKind.SCRIPT, str(script_of(tmp_path, text))))
    with pytest.raises(GroupChanged):
        prepare().run()
    prepare().run()
    vars(builtins).pop("queue_of_this_test").put(None)
    vars(builtins).pop("pool_of_this_test").shutdown()


def test_what_a_script_registered_is_called_once_and_that_of_others_at_the_processes_end(
    tmp_path: Path,
) -> None:
    calls: list[str] = []
    at_the_end = partial(calls.append, "of the process")
    atexit.register(at_the_end)
    text = (
        "import atexit, pathlib, sys, tempfile\n"
        "folder = tempfile.TemporaryDirectory()\n"
        "def bye():\n"
        "    assert pathlib.Path(folder.name).is_dir(), 'others are still there'\n"
        "    folder.cleanup()\n"
        "    with open(pathlib.Path(sys.argv[1]) / 'byes', 'a') as file: file.write('x')\n"
        "def never(): raise SystemExit('unregistered')\n"
        "atexit.register(bye)\n"
        "atexit.register(never)\n"
        "atexit.unregister(never)\n"
    )
    try:
        assert run_twice(tmp_path, text) == ["byes"]
    finally:
        atexit.unregister(at_the_end)
    assert (tmp_path / "out" / "byes").read_text() == "xx"
    assert calls == []


def test_a_package_with_compiled_parts_stays_whole(tmp_path: Path) -> None:
    package = tmp_path / "package_half_compiled"
    package.mkdir()
    # As a compiled part would, it knows the class of the other one for ever.
    (package / "__init__.py").write_text(
        "import sys, types\n"
        "from package_half_compiled import plain\n"
        "part = types.ModuleType('package_half_compiled.part')\n"
        "part.__file__ = __file__.replace('__init__.py', 'part.so')\n"
        "part.Kind = plain.Kind\n"
        "sys.modules.setdefault(part.__name__, part)\n"
    )
    (package / "plain.py").write_text("class Kind: pass\n")
    text = (
        "import package_half_compiled, sys\n"
        "known = sys.modules['package_half_compiled.part'].Kind\n"
        "assert isinstance(package_half_compiled.plain.Kind(), known)\n"
    )
    assert run_twice(tmp_path, text) == []


def test_a_script_that_exits_with_a_code_has_failed(tmp_path: Path) -> None:
    script = script_of(tmp_path, "raise SystemExit(3)\n")
    with pytest.raises(SystemExit, match="3"):
        entry.load(Entry(EntryKind.SCRIPT, str(script)))().run()
