"""The command `coli`."""
