"""Settings of a project: where they come from, what they are, and where the project's state lives."""
