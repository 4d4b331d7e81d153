"""The tuner: model selection, prompt tuning and weight tuning on one task set, with one judge and one report.

Meets the proxy by HTTP and through the store alone. Importing it costs nothing: torch stays where weights are trained.
"""
