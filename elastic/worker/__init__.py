"""Inside each training process. Each package here may import those above it in this list.

What is where:

    base          mailboxes between the threads, interrupts, signs of progress, timing
    group         torch groups that form and break in one process, sockets, the rendezvous store
    state         what the state of training consists of, checksums, memory for snapshots, transfer
    reduce        gradients: buckets, their exchange, the sum in the order of the tree
    data          micro-batches out of the user's DataLoader
    checkpoint    snapshots to storage, reported checkpoints, their commit, validation, deletion
    engine        the step engine, and all that a loop over `train.epochs()` meets
    process       the process: zygote, the two threads, the call of user code
"""
