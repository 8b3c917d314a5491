"""Functions of the user, and classes of callables, as datasets carry them to other processes."""

from __future__ import annotations

import asyncio
import inspect
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.worker.data.randomness import seeded


@dataclass
class Function:
    """A user's function, or a class of callables, with one instance per process.

    Attributes:
        given: the function or the class.
        args, kwargs: for each call, after the batch; None for none.
        constructor_args, constructor_kwargs: for the class.
        place: number of operations before it in the plan.
    """

    given: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    constructor_args: Sequence[Any] = ()
    constructor_kwargs: Mapping[str, Any] | None = None
    place: int = 0
    _called: Any = field(default=None, init=False, repr=False, compare=False)
    _loop: Any = field(default=None, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return getattr(self.given, "__name__", type(self.given).__name__)

    @property
    def is_class(self) -> bool:
        """Return whether it is a class, so that the first call creates an instance."""
        return inspect.isclass(self.given)

    def made(self) -> Any:
        """Return what is called; the first time this creates a class's instance.

        What that draws at random is the same in each process: whichever batch comes first in one
        has no part in it. It differs by the place in the plan and the constructor's arguments.
        """
        if self._called is None:
            called = self.given
            if self.is_class:
                given = (self.constructor_args, self.constructor_kwargs or {})
                seed = zlib.crc32(repr((self.name, self.place, _plain(given))).encode())
                with seeded(seed):
                    called = self.given(*self.constructor_args, **(self.constructor_kwargs or {}))
            self._called = called
        return self._called

    def __call__(self, *values: Any, **more: Any) -> Any:
        """Call it, and wait for it if it is async."""
        found = self.made()(*values, *self.args, **(self.kwargs or {}), **more)
        if inspect.isasyncgen(found):
            return (one for one in self._awaited(_listed(found)))
        return self._awaited(found) if inspect.iscoroutine(found) else found

    def _awaited(self, coroutine: Any) -> Any:
        """Run a coroutine in a loop of this function's own: a notebook has one in this thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=self._loop.run_forever, name=f"async-{self.name}", daemon=True
            ).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the instance: each process creates its own."""
        return {**self.__dict__, "_called": None, "_loop": None}


def _plain(value: Any) -> Any:
    """Return what a value's text may be made of that is the same in each process.

    Pickles are not: they depend on hashes, on addresses, and on what is one object by chance.
    """
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if type(value) in (str, bytes, bool, int, float, type(None)):
        return value
    has_name = inspect.isclass(value) or inspect.isfunction(value)
    return value.__qualname__ if has_name else type(value).__qualname__


async def _listed(generator: Any) -> list[Any]:
    return [one async for one in generator]
