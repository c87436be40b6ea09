"""Measures and explains: works through `llm`, prints nothing."""
