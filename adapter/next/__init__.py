"""Hold what will replace `adapter.core` and `adapter.control`; nothing uses it yet."""
