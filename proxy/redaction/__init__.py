"""proxy/redaction."""
