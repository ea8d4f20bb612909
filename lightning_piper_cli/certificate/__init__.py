"""A checker of certificates that needs only Python, and shares no code with `lightning_piper`."""
