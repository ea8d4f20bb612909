"""Which passes of regions is a joint graph cut into, and what is the code of each pass?"""
