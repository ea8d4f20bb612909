"""Steps, and parts of steps, that run the user's code under eager autograd instead of a captured graph."""
