"""The state of training: what it consists of, its checksums, and how it is copied and sent."""
