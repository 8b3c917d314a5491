"""What all parts of a worker use: mailboxes between its threads, interrupts, signs of progress.

What is where:

    control       mailboxes (main thread and control thread), interrupt, signals
    watching      activity (works or waits), thread_frames, timing, spans (for profilers)
    processes     children (that a worker has started)
    torch         torch_names (every private name that is used), numbers
"""
