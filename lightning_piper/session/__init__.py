"""A module's steps as programs: captured, compiled, kept for the next batch like it, run on what this process holds."""
