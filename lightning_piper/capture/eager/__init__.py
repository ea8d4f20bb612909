"""Steps, and parts of steps, that run without a graph."""
