"""The processes of a run: their ranks and groups, the checks that they agree, and the handling of
failures."""
