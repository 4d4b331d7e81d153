"""Crediting: from verdicts to the advantages that the learner is told. Pure."""
