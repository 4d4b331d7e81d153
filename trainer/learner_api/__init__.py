"""What the controller asks of a learner, as an interface and as messages. Imports no torch."""
