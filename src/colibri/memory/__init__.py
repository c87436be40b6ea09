"""Expert store, arena, slots, reader, eviction, budget."""
