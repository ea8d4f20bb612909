"""Training steps that cannot be captured as a whole. Piper runs such a step uncaptured in replicas, or
captures only the calls of annotated modules."""
