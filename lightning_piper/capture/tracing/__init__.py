"""How does a step become one joint graph?"""
