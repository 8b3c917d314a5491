"""The state of training: what it consists of, its checksums, and how it is copied and sent.

What is where:

    contents      train_state, sharded_state, dtensor, pending_steps
    checksums     checksums (of bytes), replica_checksums (of what must be alike on all members)
    memory        arena (snapshots that outlive workers)
    as bytes      packing (a state as plain values and tensors), transfer (to another member)
"""
