"""Running a module's steps as programs: each is captured, compiled, cached for similar batches, and run on
this process's tensors."""
