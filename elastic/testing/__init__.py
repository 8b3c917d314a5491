"""What users test with: a cluster of real processes on one machine, made to be broken."""
