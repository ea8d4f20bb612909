"""The passes of regions into which a joint graph is cut, and the code of each pass."""
