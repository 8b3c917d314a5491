"""Inside each training process: its place in the run, its group, its reports."""
