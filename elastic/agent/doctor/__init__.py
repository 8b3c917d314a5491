"""`elastic-agent doctor`: is this machine fit to be a node, and what to do where it is not."""
