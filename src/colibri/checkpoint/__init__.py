"""Files of a checkpoint: headers, tensors by name, experts by (layer, expert), our container."""
