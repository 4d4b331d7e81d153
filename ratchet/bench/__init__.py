"""Measuring: what the proxy costs its user, on their own machine and vLLM"""
