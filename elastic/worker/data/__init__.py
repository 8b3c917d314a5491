"""Micro-batches out of the user's DataLoader."""
