"""Notices that this machine is about to be taken: one interface, one module for each source."""
