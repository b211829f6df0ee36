"""Demo data made by code: twelve small databases and the questions about them, the same bytes on every machine."""
