"""What does a step get in place of the values that a trace does not have?"""
