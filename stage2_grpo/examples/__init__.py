"""Agents of other frameworks, trained through the same gateway."""
