"""Which Python state does a step read and change, and when may its graph run again?"""
