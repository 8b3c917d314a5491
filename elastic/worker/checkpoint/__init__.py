"""Checkpoints: copied between two steps, written, recorded, marked, validated and deleted."""
