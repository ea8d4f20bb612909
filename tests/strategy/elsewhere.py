"""Python state in another module than that of the step."""

BETA = 1.0


class Settings:
    beta = 1.0
