"""From a recipe, or from a model and a layout, to what it would take."""
