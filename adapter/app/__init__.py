"""Builds an adapter of its parts. Nothing outside this package and cli sees Settings."""

from adapter.app.adapter import Adapter

__all__ = ["Adapter"]
