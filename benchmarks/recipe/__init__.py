"""Small-scale evidence for the recipe's choices; see __main__.py and docs/recipe_evidence.md."""
