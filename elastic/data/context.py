"""Ray's `DataContext`, accepted for compatibility: its execution settings have no effect here."""

from __future__ import annotations

from types import SimpleNamespace


class DataContext(SimpleNamespace):
    """Accepts any setting, such as `execution_options.preserve_order`: order is always kept."""

    @staticmethod
    def get_current() -> DataContext:
        """Return the context of this process."""
        return _current


_current = DataContext(execution_options=SimpleNamespace(preserve_order=True))
