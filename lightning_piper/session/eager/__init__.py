"""Training steps that cannot be captured whole: such steps run uncaptured in replicas, or with a captured
part."""
