"""The command line: serves, and is the client of a running adapter."""
