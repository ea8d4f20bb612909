"""Python state of another module than the step's."""

BETA = 1.0


class Settings:
    beta = 1.0
