"""The input of a search: the blocks of a model, and the time and memory that each block takes."""
