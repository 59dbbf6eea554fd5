"""`dstk schema`: the JSON Schema of recipes, as committed in recipes/recipe.schema.json."""

import json

import click

from toolkit.recipe_file import json_schema


def text() -> str:
    """The schema as the committed file holds it."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


@click.command
def command() -> None:
    """Print the JSON Schema of recipes, for completion and checks in an editor.

    A recipe names it in a comment: # yaml-language-server: $schema=../recipe.schema.json
    """
    click.echo(text(), nl=False)
