"""`doctor`: what would spoil a long run, found before it starts."""
