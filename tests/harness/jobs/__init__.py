"""Training scripts that workers run in tests; the only modules here that import torch."""
