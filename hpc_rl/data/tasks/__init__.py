"""Scripts that make the data sets and models of the example configurations."""
