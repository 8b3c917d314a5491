"""Which trials of a study go on: pure rules, each with the reason for what it says."""
