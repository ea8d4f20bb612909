"""Cut a joint graph into passes of regions, and make the code of each pass. `graph_cut.cut` is the entry."""
