"""The client of the learner service. Imports no torch."""
