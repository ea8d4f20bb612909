"""Keep traced graphs in memory and in files, so that the same step is not traced again."""
