"""What every test may rely on."""

import signal

from hypothesis import settings

# Hypothesis judges what a property says, not how busy the machine is: no time limit for a single example.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

# A shell starts background jobs with Ctrl-C ignored, and they hand that on; tests of interruptions need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)
