"""How the examples' tiny policies are made: a chat template, a tokenizer, and a warm start on scripted episodes.

A policy is a Llama of under a million parameters that plays one example's agent and nothing else. Each example says
what its policy is taught (`Lessons`); nothing here knows an example.
"""
