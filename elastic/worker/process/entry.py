"""The entry point of a job: a pickled function, a script or a module, ready to be called.

Rule: everything that can be found wrong before a group forms is found by `load`. A function that
is called again has its own copy of the config each time: what an earlier generation changed in it,
or what a failed attempt left half done, does not leak into the next one.
"""

from __future__ import annotations

import atexit
import inspect
import io
import logging
import os
import pickle
import runpy
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from multiprocessing import spawn
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from elastic.core.facts import Entry, EntryKind
from elastic.errors import UsageError
from elastic.worker.process.importing import (
    import_ahead,
    imports_of,
    modules_of,
    places_of,
    put_first,
    uses_us,
)

RUN_NAME = "__main__"


@dataclass(frozen=True)
class EntryCall:
    """One call of the entry point, not made yet.

    Attributes:
        run: makes it, and returns what the train function returned; None for scripts, whose
            `sys.exit()` comes out as it is.
        options: what the library passed along with the function.
        is_foreign: it is a script or module that does not use this library.
    """

    run: Callable[[], Any]
    config: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_foreign: bool = False


def _with_file(code: CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, but keep the name of its file: tracebacks show it."""
    make, values = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if one == "<dynamic-code>" else one for one in values)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as cloudpickle does.

    Attributes:
        modules: that what is pickled refers to.
    """

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _with_file}, cloudpickle.Pickler.dispatch_table
    )

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def persistent_id(self, one: Any) -> None:
        """Note the module of what is pickled by its name; nothing is pickled in another way."""
        kind = type(one)
        if issubclass(kind, BY_NAME):
            name = one.__name__ if issubclass(kind, ModuleType) else one.__module__
            if isinstance(name, str):
                self.modules.add(name)


BY_NAME = (type, FunctionType, BuiltinFunctionType, ModuleType)


@dataclass(frozen=True)
class PackedCall:
    """What is sent of a function.

    Attributes:
        payload: of a FUNCTION entry.
        imports: installed modules that workers import before it does anything else.
    """

    payload: bytes
    imports: tuple[str, ...]


def pack(function: Callable[..., Any], config: Any, options: Mapping[str, Any]) -> PackedCall:
    """Return the payload of a FUNCTION entry, with the arguments of this process.

    They come first: modules may read them while the function is unpickled. They are not the
    entry's `args`, which everyone sees: they may be secret, or no Unicode. UsageError if
    something in it cannot be pickled.
    """
    try:
        packed = io.BytesIO(pickle.dumps(sys.argv[1:]))
        packed.seek(0, io.SEEK_END)
        pickler = _Pickler(packed)
        pickler.dump((function, config, dict(options)))
    except Exception as error:
        raise UsageError(
            f"the train function {getattr(function, '__name__', function)!r} or its config cannot "
            f"be sent to workers ({type(error).__name__}: {error}); create what cannot be pickled "
            f"(files, locks, connections, loaders) inside the function"
        ) from error
    by_value = {RUN_NAME, *cloudpickle.list_registry_pickle_by_value()}
    return PackedCall(packed.getvalue(), imports_of(function, pickler.modules - by_value))


def load(entry: Entry, *, imports_ahead: bool = True) -> Callable[[], EntryCall]:
    """Prepare this process for an entry point; return what prepares one call, anew for each.

    Changes the working directory and `sys.path`. With `imports_ahead`, packages that a script needs
    first are imported before it has a group, so before the environment names its rank. UsageError
    if something is not on this node; or whatever unpickling the function raises.
    """
    if entry.working_dir:
        try:
            os.chdir(entry.working_dir)
        except OSError as error:
            raise UsageError(
                f"working directory {entry.working_dir} cannot be entered on this node "
                f"({error.strerror}); every node needs it, shared or copied"
            ) from error
    for directory in reversed(entry.python_path):
        put_first(directory)
    if entry.kind is EntryKind.FUNCTION:
        _function_call(entry)  # An import error is known before the group forms.
        return lambda: _function_call(entry)
    run: Callable[[], None]
    if entry.kind is EntryKind.SCRIPT:
        path = _script_path(entry)
        if imports_ahead:
            import_ahead(path)
        script = Path(path)
        is_foreign = script.suffix == ".py" and not uses_us([script], script.parent)
        run = partial(_run_script, path, entry.args)
    else:
        is_foreign = not uses_us(_module_files(entry), Path())
        run = partial(_run_module, entry)
    return lambda: EntryCall(run, is_foreign=is_foreign)


def end_script() -> None:
    """Do what Python does where a script ends, in a process that runs no other one.

    Its threads and the work in its executors are waited for, and what it registered with `atexit`
    has the time that it takes: a checkpoint that a thread still writes belongs to its success.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _function_call(entry: Entry) -> EntryCall:
    packed = io.BytesIO(entry.payload)
    sys.argv = [RUN_NAME, *pickle.load(packed)]  # As its modules read it in the driver.
    function, config, options = pickle.load(packed)
    if not callable(function):
        raise UsageError(f"the train function of {entry.target} is a {type(function).__name__}")
    if level := options.get("log_level"):
        logging.getLogger("elastic").setLevel(level)

    def run() -> Any:
        theirs = _from_script(function)
        if not theirs:
            return call_with_config(function, config)
        _show_as_main(theirs)
        with _spawned_have_it(entry.payload):
            return call_with_config(function, config)

    return EntryCall(run, config, options)


def _from_script(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what came of the driver's script along with a function, nothing if it is a module's.

    Its file is left out: processes that are spawned would run it, and so might submit the job once
    more.
    """
    while isinstance(function, partial):
        function = function.func
    theirs = getattr(function, "__globals__", {})
    if theirs.get("__name__") != RUN_NAME:
        return {}
    return {name: one for name, one in theirs.items() if name != "__file__"}


def _show_as_main(theirs: Mapping[str, Any]) -> None:
    """Have what came of the driver's script in `__main__`, where pickle looks it up by name.

    Processes of a DataLoader and of `multiprocessing`, and `torch.save` of a whole model, pickle
    the script's classes and functions so.
    """
    main = ModuleType(RUN_NAME)
    vars(main).update(theirs)
    sys.modules[RUN_NAME] = main


@contextmanager
def _spawned_have_it(payload: bytes) -> Iterator[None]:
    """Have the same in `__main__` of processes that are spawned, or come from a fork server.

    There multiprocessing runs the file of `__main__`: it is given one that unpickles the payload.
    """
    real = spawn.get_preparation_data
    with ExitStack() as files:

        def memory(content: bytes) -> str:
            file = files.enter_context(os.fdopen(os.memfd_create("elastic-main"), "wb"))
            file.write(content)
            file.flush()
            return f"/proc/{os.getpid()}/fd/{file.fileno()}"

        @cache
        def script() -> str:
            load = f"from {__name__} import script_names; globals().update(script_names(%r))"
            return memory((load % memory(payload)).encode())

        def preparation(name: str) -> dict[str, Any]:
            return {**real(name), "init_main_from_path": script()}

        spawn.get_preparation_data = preparation  # type: ignore[assignment]
        try:
            yield
        finally:
            spawn.get_preparation_data = real


def script_names(path: str) -> dict[str, Any]:
    """Return what came of the driver's script with the payload in a file."""
    with open(path, "rb") as packed:
        pickle.load(packed)  # Arguments: a process that is spawned has those of its parent.
        function, *_ = pickle.load(packed)
    return _from_script(function)


def call_with_config(function: Callable[..., Any], config: Any) -> Any:
    """Call a train function with its config, or without if it takes no argument.

    Raises:
        UsageError: it needs more than one argument.
    """
    if not takes_config(function):
        return function()
    return function({} if config is None else config)


def takes_config(function: Callable[..., Any]) -> bool:
    """Return whether a train function is called with its config, rather than with nothing.

    Raises:
        UsageError: it needs more than one argument.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return True  # Some C functions have no signature.
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    needed = [p.name for p in positional if p.default is p.empty]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(needed) > 1 or keywords:
        raise UsageError(
            f"the train function takes {', '.join(needed + keywords)}: expected one argument, the "
            f"config, or none; put all of them into train_loop_config"
        )
    return bool(positional) or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _script_path(entry: Entry) -> str:
    path = Path(entry.target).expanduser().absolute()
    if not path.is_file():
        raise UsageError(
            f"script {path} is not on this node; every node needs it at this path, shared or "
            f"copied, or give --working-dir"
        )
    return str(path)


def _run_script(path: str, args: tuple[str, ...]) -> None:
    put_first(str(Path(path).parent))
    sys.argv = [path, *args]
    if Path(path).suffix != ".py":
        runpy.run_path(path, run_name=RUN_NAME)  # Compiled, or an archive.
        return
    # As Python itself; for runpy a script is of a package "", and not of none.
    main = ModuleType(RUN_NAME)
    loader = SourceFileLoader(RUN_NAME, path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader)
    with _as_main(main):
        exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), vars(main))


@contextmanager
def _as_main(main: ModuleType) -> Iterator[None]:
    """Have a script's module in `__main__`.

    It stays behind the script's end: threads and functions at exit may pickle what is of its
    classes. A script that is left early may run again here: models of its globals must go before.
    """
    before = sys.modules[RUN_NAME]
    sys.modules[RUN_NAME] = main
    try:
        yield
    except SystemExit:
        raise
    except BaseException:
        sys.modules[RUN_NAME] = before
        raise


def _module_files(entry: Entry) -> list[Path]:
    """Return the files of the module that is run, or of its whole package.

    No package is imported: packages may read their rank.

    Raises:
        UsageError: its first part is not there.
    """
    try:
        places = places_of(entry.target)
    except (ModuleNotFoundError, ValueError):
        places = None
    if places is None:
        raise UsageError(
            f"module {entry.target} is not on this node; looked in {', '.join(sys.path)}"
        )
    return [file for place in places for file in modules_of(place)]


def _run_module(entry: Entry) -> None:
    sys.argv = [entry.target, *entry.args]
    with _as_main(ModuleType(RUN_NAME)):
        # As `python -m` does.
        runpy._run_module_as_main(entry.target)  # type: ignore[attr-defined]
