"""A config.json as it lies on the disk: one JSON object, or one line that says why not."""

import json
from pathlib import Path
from typing import Any

from toolkit.errors import ModelError


def read(path: Path) -> dict[str, Any]:
    """The object in the file. Raises ModelError where there is none, and FileNotFoundError without a file."""
    try:
        # Editors on Windows begin a file with a byte order mark.
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Check the file and its permissions.") from None
    except RecursionError:
        raise ModelError(f"{path} is nested too deep for a config. Name the config.json of a model.") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error}. Correct it, or save the model again.") from None
    except ValueError:  # Python's limit
        raise ModelError(f"{path} has a number of thousands of digits. Correct it, or save the model again.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}: a config is a JSON object. Save the model again.")
    return config
