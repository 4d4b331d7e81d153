"""The servers behind the proxy: how they are reached, and what they must have loaded."""
