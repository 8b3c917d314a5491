"""The public test kit: simulator, faults, checkers."""
