"""Hand-made tensor plans, one file a family, named like its model_type."""
