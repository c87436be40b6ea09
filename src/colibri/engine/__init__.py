"""Token ids and tensors: sessions, prefill, decode, sampling, metrics."""
