"""Hypothesis judges what a property says, not how busy the machine is: no time limit for a single example."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
