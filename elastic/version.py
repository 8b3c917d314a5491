"""The version of this package; `elastic.__version__` is the same for users."""

__version__ = "0.1.0"
