"""`python -m toolkit.training` is recipes/train.py, wherever the toolkit is installed: for any launcher."""

import runpy

from toolkit.config.gallery import find_recipes
from toolkit.launch.output import reported_errors

if __name__ == "__main__":
    with reported_errors():
        script = find_recipes() / "train.py"
    runpy.run_path(str(script), run_name="__main__")
