"""The planner: predicts the memory and the step time of a recipe, or of a model in a layout, and chooses layouts."""
