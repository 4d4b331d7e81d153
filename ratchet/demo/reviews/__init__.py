"""An agent that labels reviews with one word: the demo trains it on a real pretrained model.

It speaks to any OpenAI-compatible server and shares its command line with the demo's e-mail agent.
"""
