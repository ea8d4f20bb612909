"""Which line of the user's code does an operation or an error come from, and whose error is it?"""
