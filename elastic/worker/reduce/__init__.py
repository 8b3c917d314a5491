"""Gradients: buckets, their exchange, and the sum in the order of the tree."""
