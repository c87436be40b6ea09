"""How fast a model will run here, before it is loaded: probes, work of a token, and what binds."""
