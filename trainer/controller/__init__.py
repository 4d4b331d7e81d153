"""The controller as a process: its agents, their leases, and one agent's controller, which steps what is due."""
