"""The learner as a service: HTTP server of rank zero, fair turns between agents, one compute thread."""
