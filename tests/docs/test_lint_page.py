import importlib.util
from pathlib import Path

from toolkit.lint.finding import RULES

ROOT = Path(__file__).parents[2]


def test_the_rules_in_the_documents_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate_lint", ROOT / "docs" / "generate_lint.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    current = generator.PAGE.read_text()
    assert generator.page(current) == current, "run: python docs/generate_lint.py"
    assert all(f"| {name} |" in current for name in RULES)
