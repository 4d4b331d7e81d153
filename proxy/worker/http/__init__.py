"""Who may come in, how much of it, and what of it may be kept: keys, limits, connections, redaction."""
