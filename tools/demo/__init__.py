"""The bundled demo model: its corpus, its architecture, its training and its measurements."""
