"""Messages as bytes: the codec between facts and protobuf, frames, and the worker's pipe."""
