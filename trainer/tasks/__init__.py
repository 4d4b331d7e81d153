"""trainer/tasks."""
