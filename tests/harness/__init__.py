"""What tests and benches share: faults for real clusters and storage, jobs to train, verdicts."""
