"""The metric objects that a step calls, and their arguments."""
