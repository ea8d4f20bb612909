"""Spares replace processes that a fit loses."""
