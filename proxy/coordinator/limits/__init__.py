"""Rate limits per API key."""
