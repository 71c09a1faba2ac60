"""Studies: questions that are answered by training, as files that name variants and a rule."""
