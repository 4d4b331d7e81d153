"""tuner/tasks."""
