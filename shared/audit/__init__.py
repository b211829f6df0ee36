"""Is a right answer right for the right reason? Perturbed copies of a database, and golds that a trivial query satisfies."""
