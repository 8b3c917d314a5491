"""Notices that this machine will be preempted or shut down: one interface, a module per source."""
