"""Which trials of a study continue: pure functions that return a decision with its reason."""
