"""Real clients, unmodified, each in a process and an environment of its own, against the proxy."""
