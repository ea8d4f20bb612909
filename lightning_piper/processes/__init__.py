"""The processes of a run: who they are, what they must agree on, and what happens when one fails."""
