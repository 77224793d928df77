"""Serves HTTP with one coroutine for each connection, which is stepped by hand.

It stands beside the listener of adapter/frontends/http/server.py until it takes its place. A
request is served straight down: `serve.py` reads the next one, routes it, and words its errors;
`inference.py` has an inference from its lease to its answer; `calls.py` has all other calls.
"""
