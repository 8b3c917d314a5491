"""Durable storage through fsspec: run directories, and checkpoints that count once marked."""
