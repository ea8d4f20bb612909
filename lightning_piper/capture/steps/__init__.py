"""Captured steps, with their code for each batch size."""
