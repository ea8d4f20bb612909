"""Training steps that cannot be captured whole: they run uncaptured in replicas, or with a captured part."""
