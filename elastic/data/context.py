"""Ray's `DataContext`, accepted for compatibility: its execution settings have no effect here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace


class DataContext(SimpleNamespace):
    """Accepts any setting, such as `execution_options.preserve_order`: order is always kept."""

    @staticmethod
    def get_current() -> DataContext:
        """Return the context of this process."""
        return _current

    @staticmethod
    @contextmanager
    def current(context: DataContext) -> Iterator[DataContext]:
        """Return `context` from `get_current` inside of a `with`."""
        global _current
        before, _current = _current, context
        try:
            yield context
        finally:
            _current = before

    def copy(self) -> DataContext:
        """Return a copy, whose settings can be changed by themselves."""
        return copy.deepcopy(self)


_current = DataContext(execution_options=SimpleNamespace(preserve_order=True))
