"""How does Piper run a step, or a part of a step, that has no graph?"""
