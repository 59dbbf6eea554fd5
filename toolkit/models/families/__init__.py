"""Model families: what is known about a `model_type` of Hugging Face is its FamilySpec, a row of families.json.

`registry.FAMILIES` has them. To add a family, add a row under the title of families that are alike.
"""
