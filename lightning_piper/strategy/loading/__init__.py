"""Data loaders of a fit: their samplers, their seeds, and their positions in an epoch."""
