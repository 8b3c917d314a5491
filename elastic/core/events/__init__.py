"""Every event that can happen to a machine, and every effect that a machine may ask for.

Rule: effects are performed in the order given. `Persist` is a barrier: what stands after it is
not done before it is durable; if the process dies in between, it never happens.
Events and effects are named from the machine's point of view.
"""
