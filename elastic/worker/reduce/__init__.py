"""Gradients: buckets, their exchange, and the sum in the order of the tree.

What is where:

    collecting    reducer, of a sharded model sharded_reduce; buckets, backward
    exchanging    tree_exchange (what is sent and added), over transports; bucket_exchanges
    committing    commit_gate (when a step is final), grad_preview, model_buffers
    with a step   step_share (what this rank does of it), step_metadata (numbers that ride along)
"""
