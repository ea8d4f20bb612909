"""Placeholders that a step gets in place of the values that a trace does not have."""
