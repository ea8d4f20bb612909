"""How do losses, logged values and gradients of parts of a batch combine into those of the whole batch?"""
