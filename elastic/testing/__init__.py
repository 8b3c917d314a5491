"""Test support for users: a cluster of real processes on one machine, for fault injection."""
