"""Running a module's steps as programs. Piper captures each step, compiles it, keeps the program for similar
batches, and runs it on this process's tensors."""
