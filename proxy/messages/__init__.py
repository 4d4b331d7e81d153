"""proxy/messages."""
