"""How losses, logged values and gradients of parts of a batch combine into the values of the whole batch."""
