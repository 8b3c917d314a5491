"""Every event that a state machine processes, and every effect that it may return.

Rule: effects are performed in the order given. `Persist` is a barrier: later effects are performed
only after it is durable, and never if the process dies before.
Events and effects are named from the machine's point of view.
"""
