"""What does each node of a joint graph compute, and to which region does it belong?"""
