"""Messages as bytes: the codec between dataclasses and protobuf, frames, and the worker's pipe."""
