"""Fixtures that make small recordings."""

from tests.sessions import acted, save

__all__ = ["acted", "save"]
