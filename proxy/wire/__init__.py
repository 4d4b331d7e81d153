"""proxy/wire."""
