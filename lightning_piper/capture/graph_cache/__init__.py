"""Which graph does a step have that was traced before?"""
