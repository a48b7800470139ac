"""Shared by all tests."""

import torch

# The tests' tensors are small: one thread computes them fastest, and does not suffer from a busy machine.
torch.set_num_threads(1)
