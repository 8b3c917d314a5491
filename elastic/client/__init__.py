"""The room of users: a client for driver scripts, and the `elastic` command."""
