"""Decide and do what happens to a model: loads, unloads, updates, evictions, and Triton's exits."""
