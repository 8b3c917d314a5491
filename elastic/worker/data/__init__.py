"""Micro-batches out of the user's DataLoader.

What is where:

    by number     loader, sampler_order
    as streams    streams, stream_source, stream_reader, stream_book, copying_samples
    both          feed (the inner DataLoader), reading (of the dataset), seeding, randomness
                  (without torch), attributes (what has changed), moving (to a device)
"""
