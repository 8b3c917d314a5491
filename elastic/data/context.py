"""Ray's `DataContext`: settings of its execution, none of which changes anything here."""

from __future__ import annotations

from types import SimpleNamespace


class DataContext(SimpleNamespace):
    """Takes what scripts set, such as `execution_options.preserve_order`: order is always kept."""

    @staticmethod
    def get_current() -> DataContext:
        """Return the one of this process."""
        return _current


_current = DataContext(execution_options=SimpleNamespace(preserve_order=True))
