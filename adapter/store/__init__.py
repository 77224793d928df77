"""Stores of models, and the disk cache in front of them."""
