"""Decide about models and memory with pure functions and values: no IO, no clock, no await."""
