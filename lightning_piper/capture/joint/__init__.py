"""The meaning of the nodes of a joint graph, and the region to which each node belongs."""
