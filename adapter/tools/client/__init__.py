"""The commands that talk to a running adapter."""
