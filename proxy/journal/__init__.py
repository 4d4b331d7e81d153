"""proxy/journal."""
