"""Captured steps: `capture` makes them, and `CapturedStep.at` makes their code for each batch size."""
