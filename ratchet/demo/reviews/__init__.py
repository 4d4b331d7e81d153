"""An agent that labels reviews with one word: tasks, agent, judge. The demo trains it on a real pretrained model.

The agent speaks to any OpenAI-compatible server. It imports nothing else of Ratchet but the demo's e-mail agent, whose
workers and progress it shares.
"""
