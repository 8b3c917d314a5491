"""The client library for driver scripts, and the `elastic` command."""
