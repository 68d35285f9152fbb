"""Planning before submission: the lengths of a dataset, and the memory and hours of a recipe."""
