"""The server: every dialect of HTTP is a thin translation over one path of generation."""
