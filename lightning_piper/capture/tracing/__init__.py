"""The trace of a step into one joint graph."""
