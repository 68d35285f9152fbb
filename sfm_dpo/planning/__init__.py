"""Before submission: the lengths of a dataset, memory and hours of a recipe."""
