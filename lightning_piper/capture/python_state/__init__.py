"""Find the Python state that a step reads and changes. Guards on this state decide whether the step's graph
may run again."""
