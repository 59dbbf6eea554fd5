"""Set-ups of other programs: the recipe that trains the same, and what of a set-up has no counterpart in a recipe."""
