"""Holds the built extension module `_eae`, the Go core. `tools/build_core.py` makes it; nothing else belongs here."""
