"""`make mutants`: changes of the product's behaviour, each of which a test must notice."""
