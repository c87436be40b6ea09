"""Blocks of a model: their parameters and shapes, joined to the kernels that compute them."""
