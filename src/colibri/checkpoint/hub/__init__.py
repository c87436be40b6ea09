"""The hub: what its repositories hold, and how that comes onto this machine and leaves it."""
