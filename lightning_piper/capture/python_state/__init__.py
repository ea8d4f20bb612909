"""The Python state that a step reads and changes, and the guards that decide when its graph may run again."""
