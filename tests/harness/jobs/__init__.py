"""Scripts that workers run under test; the only ones here that import torch."""
