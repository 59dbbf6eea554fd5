"""The documents say what is so: links lead somewhere, commands and recipes in them are accepted, output is current."""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml
from nonempty import nonempty

from toolkit.cli.main import COMMANDS, cli, main
from toolkit.config import load_recipe
from toolkit.config.parallel_rules import ULYSSES_FAMILIES
from toolkit.config.recipe import Recipe
from toolkit.config.section import Section
from toolkit.models.families.registry import find_spec
from toolkit.models.support import KINDS, all_families

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
assert len(DOCUMENTS) > 15
LAUNCHERS = ("deepspeed", "accelerate", "torchrun", "srun", "python", "mpirun")

Case = tuple[str, str]
"""A document, and what stands in it."""


def blocks(document: Path, *languages: str) -> list[str]:
    """The contents of a document's code blocks whose opening fence is one of ```language."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language.strip() in languages]


def prose(document: Path) -> str:
    """A document without its code blocks."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(document: Path) -> Iterator[list[str]]:
    """The words of each command in ```bash and ```console blocks."""
    shown = [line[2:] for body in blocks(document, "console") for line in body.splitlines() if line.startswith("$ ")]
    written = [line for body in blocks(document, "bash") for line in body.replace("\\\n", " ").splitlines()]
    for line in (*shown, *written):
        words = shlex.split(line.partition(" > ")[0], comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def cases(found: Iterator[Case] | Sequence[Case]) -> list[object]:
    return [pytest.param(name, text, id=f"{name}: {text.strip().splitlines()[0][:90]}") for name, text in found]


def each(*languages: str) -> list[object]:
    return cases([(path.name, body) for path in DOCUMENTS for body in blocks(path, *languages)])


def all_commands(*programs: str) -> list[object]:
    return cases(
        [(path.name, shlex.join(words)) for path in DOCUMENTS for words in commands(path) if words[0] in programs]
    )


def slugs(document: Path) -> set[str]:
    """The anchors of a document's headings, as code hosts make them."""
    seen: dict[str, int] = {}
    out = set()
    for heading in re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        out.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return out


def links() -> Iterator[Case]:
    for path in DOCUMENTS:
        for in_markdown, in_html in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", prose(path)):
            target = in_markdown or in_html
            # A badge is relative to the repository's page on the code host, not to its files.
            if not target.startswith(("http://", "https://", "mailto:", "../../actions/")):
                yield str(path.relative_to(ROOT)), target


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("document", "target"), cases(links()))
def test_a_link_leads_to_a_file_and_a_heading_that_exist(document: str, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (ROOT / document).parent / path if path else ROOT / document
    assert file.exists(), f"{document} links to {target}"
    assert not anchor or anchor in slugs(file), f"{document} links to {target}; headings: {sorted(slugs(file))}"


@pytest.mark.parametrize(("document", "text"), each("yaml"))
def test_a_recipe_in_a_document_decodes(document: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(("document", "text"), each("yaml section"))
def test_a_section_in_a_document_decodes_in_place_of_the_demos(document: str, text: str, tmp_path: Path) -> None:
    sections = yaml.safe_load((ROOT / "recipes" / "demo.yaml").read_text())
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({name: value for name, value in sections.items() if not re.search(rf"(?m)^{name}:", text)})
        + text
    )
    load_recipe(tmp_path / "recipe.yaml")


def test_every_make_target_in_a_document_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (path.name, target)
        for path in DOCUMENTS
        for code in (*re.findall(r"`([^`\n]+)`", prose(path)), *blocks(path, "bash", "console"))
        for target in re.findall(r"(?:^|\$ )make ([a-z-]+)", code, re.MULTILINE)
    }
    assert named
    assert {(name, target) for name, target in named if target not in targets} == set()


@pytest.mark.parametrize(("document", "command"), all_commands("dstk"))
def test_a_dstk_command_in_a_document_parses(document: str, command: str) -> None:
    _, name, *arguments = shlex.split(command)
    with click.Context(cli) as context:
        found = cli.get_command(context, name)
        assert found is not None, f"{document}: dstk has no command {name}"
        found.make_context(name, arguments, parent=context)


def test_every_dstk_command_that_prose_names_exists() -> None:
    named = {name for path in DOCUMENTS for name in re.findall(r"`dstk ([a-z]\w*)", prose(path))}
    assert named <= COMMANDS.keys()


@pytest.mark.parametrize(("document", "command"), all_commands("dstk", *LAUNCHERS))
def test_the_recipe_of_a_command_exists_and_takes_its_overrides(document: str, command: str) -> None:
    words = shlex.split(re.sub(r"\$\w+", "1", command))  # a shell replaces variables, as run_dir=runs/$SLURM_JOB_ID
    recipes = [word for word in words if word.endswith(".yaml")]
    overrides = [word for word in words[1:] if re.match(r"[a-z_]+(\.\w+)*=", word)]
    for recipe in recipes:
        if words[1] != "validate":  # its overrides may be wrong, and what it prints is compared below
            load_recipe(ROOT / recipe, overrides)
    assert all((ROOT / word).is_file() for word in nonempty(words) if word.endswith((".py", ".yaml")))


def test_the_documents_show_how_recipes_are_run() -> None:
    shown = [word for path in DOCUMENTS for words in commands(path) for word in words]
    assert sum(word.endswith(".yaml") for word in shown) > 20
    assert sum(word == "recipes/train.py" for word in shown) > 10


@pytest.mark.parametrize(("document", "text"), each("console"))
def test_what_a_command_prints_is_what_the_document_shows(
    document: str, text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = re.findall(r"^\$ dstk (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    assert len(shown) == text.count("$ ")
    for command, output in shown:
        with pytest.raises(SystemExit):
            main(shlex.split(command))
        assert [line.rstrip() for line in "".join(capfd.readouterr()).splitlines()] == output.splitlines()


def test_the_tables_of_recipe_fields_are_up_to_date() -> None:
    generator = imported(ROOT / "docs" / "generate_recipes.py")
    current = generator.PAGE.read_text()
    assert generator.page(current) == current, "run: python docs/generate_recipes.py"


def test_the_picture_of_schedules_is_up_to_date() -> None:
    generator = imported(ROOT / "docs" / "generate_schedules.py")
    assert generator.PICTURE.read_text() == generator.picture(), "run: python docs/generate_schedules.py"


def test_the_readme_names_every_section_of_a_recipe() -> None:
    sections = {name for name, field in Recipe.model_fields.items() if _is_section(field.annotation)}
    named = set(re.findall(r"`(\w+)`", _part("## Recipes")))
    assert sections
    assert sections - named == set()
    assert named <= Recipe.model_fields.keys()


def test_the_families_of_the_readme_are_those_that_the_check_found() -> None:
    families = all_families().values()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", _part("## Supported models"), re.MULTILINE))
    (tensor_parallel,) = (names.split(", ") for title, names in rows.items() if title.startswith("tp, pp, sequence"))
    found = [family.model_type for family in families if all(family.supports(kind) for kind in KINDS)]
    dense = [name for name in found if find_spec(name).is_dense]
    assert [name.removesuffix("\\*") for name in tensor_parallel] == dense
    assert rows["the same"].startswith(f"{len(found) - len(dense)} more")
    assert {name.removesuffix("\\*") for name in tensor_parallel if name.endswith("*")} == set(ULYSSES_FAMILIES)
    pipeline_only = sum(family.supports("pipeline") and not family.supports("tensor") for family in families)
    assert rows["pp, ZeRO"].startswith(f"{pipeline_only} more")


def test_the_launchers_of_the_readme_are_those_that_are_tested() -> None:
    (block,) = (body for body in blocks(ROOT / "README.md", "bash") if body.startswith("deepspeed --num_gpus 2"))
    assert block.splitlines() == imported(ROOT / "tests" / "launch" / "test_launchers.py").COMMANDS


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 1500


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_file_that_a_document_names_exists(document: Path) -> None:
    named = re.findall(r"`((?:toolkit|recipes|tests|docs|ds_configs|benchmarks)/[\w./-]+)`", prose(document))
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_folder_of_the_package_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "toolkit").rglob("*.py")}
    assert len(folders) > 15
    assert {f"{folder}" for folder in folders if f"`{folder}/" not in text} == set()


def test_every_package_of_the_import_contract_is_drawn() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["name"] == "layers")
    modules = {module.strip().partition(".")[0] for layer in layers for module in re.split(r"[|:]", layer)}
    packages = {module for module in modules if (ROOT / "toolkit" / module).is_dir()}
    drawn = re.findall(r'class="name"[^>]*>([^<]+)</text>', (ROOT / "docs" / "images" / "architecture.svg").read_text())
    assert len(packages) > 10
    assert packages - set(drawn) == set()


def test_every_variable_of_ours_that_a_document_names_is_read() -> None:
    source = "".join(path.read_text() for path in (ROOT / "toolkit").rglob("*.py"))
    named = {name for path in DOCUMENTS for name in re.findall(r"\bDSTK_\w+", path.read_text())}
    assert {name for name in named if f'"{name}"' not in source} == set()


def test_every_document_is_reached_from_the_readme() -> None:
    reached = {target.partition("#")[0] for document, target in links() if document == "README.md"}
    assert {str(path.relative_to(ROOT)) for path in DOCUMENTS[1:]} <= reached


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _part(heading: str) -> str:
    return (ROOT / "README.md").read_text().partition(heading + "\n")[2].partition("\n## ")[0]
