"""The step engine, and all that a loop over `train.epochs()` meets."""
