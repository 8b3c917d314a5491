"""The worker process: its start from the zygote, its two threads, and the call of user code."""
