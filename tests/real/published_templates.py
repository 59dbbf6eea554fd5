"""The chat templates that TRL, axolotl, LLaMA-Factory, unsloth and @huggingface/ollama-utils publish.

`make chat-templates` and `make test-real` get the packages from PyPI and npm into build/real, which $DSTK_REAL names.
None of them is imported as a whole: LLaMA-Factory's and unsloth's need packages that are not here.
"""

import ast
import importlib
import json
import os
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

REAL = Path(os.environ.get("DSTK_REAL", "build/real")).resolve()
BOS, EOS = "<s>", "</s>"
"""Where a package does not say which tokens a model has."""
STOPS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|return|>", "<|call|>", "<|endoftext|>"),
    *("<|end_of_text|>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|EOT|>", "<end_of_turn>"),
    *("<turn|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[|endofturn|]", "<|eoa|>"),
)
"""Tokens at which the models stop that have them, by their tokenizers and generation_config.json."""
_SPECIAL = re.compile(
    r"""<\|[^\s|<>'"{}]+\|>|<｜[^｜<>'"]+｜>|<\|?/?(?:start|end)_of_[a-z]+>|<\|?turn\|?>|\[/?[A-Z][A-Z_]+\]|\[\|[a-z]+\|\]"""
    r"""|</?(?:tool_call|tool_response|think|tools)>|<\|[a-z_"]+>|<[a-z_"]+\|>"""
)
_OLLAMA = re.compile(r"""model: "library/([^"]+)",\s*gguf: ("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")


@dataclass(frozen=True, kw_only=True)
class PublishedTemplate:
    """A template, and the tokens of the models that it is for, as far as its package knows them."""

    package: str
    name: str
    template: str
    eos: str = EOS
    stops: tuple[str, ...] = ()
    """Tokens at which generation stops."""

    @property
    def special(self) -> tuple[str, ...]:
        """What must be a token."""
        return tuple(sorted({*_SPECIAL.findall(self.template), *self.stops}))


@cache
def published_templates() -> dict[str, list[PublishedTemplate]]:
    """The templates of each package, by its name. Raises FileNotFoundError if one is not there."""
    readers = {
        "trl": _trl,
        "axolotl": _axolotl,
        "llamafactory": _llama_factory,
        "unsloth": _unsloth,
        "@huggingface/ollama-utils": _ollama_utils,
    }
    return {name: [_with_stops(template) for template in read()] for name, read in readers.items()}


def package_versions() -> dict[str, str]:
    """The version of each package."""
    found = {item.name: item.version for item in distributions(path=[str(REAL)])}
    packed = json.loads(_ollama_file("package.json"))
    names = ("axolotl", "llamafactory", "unsloth")
    return {"trl": version("trl"), **{name: found[name] for name in names}, packed["name"]: packed["version"]}


def _with_stops(published: PublishedTemplate) -> PublishedTemplate:
    """The template with the stops that its text has. Phi's models stop at `<|end|>`, and gpt-oss does not."""
    stops = [token for token in STOPS if token in published.template]
    if "<|end|>" in published.template and "<|return|>" not in published.template:
        stops.append("<|end|>")
    return replace(published, stops=tuple(dict.fromkeys([*published.stops, *stops])))


def _trl() -> Iterator[PublishedTemplate]:
    spec = find_spec("trl")  # without importing it
    assert spec is not None
    assert spec.origin is not None
    for path in sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja")):
        yield PublishedTemplate(package="trl", name=path.stem, template=path.read_text())


def _axolotl() -> Iterator[PublishedTemplate]:
    folder = REAL / "axolotl" / "utils" / "chat_templates" / "templates"
    paths = sorted(folder.glob("*.jinja"))
    if not paths:
        raise FileNotFoundError(folder)
    for path in paths:
        yield PublishedTemplate(package="axolotl", name=path.stem, template=path.read_text())


def _llama_factory() -> Iterator[PublishedTemplate]:
    """Its templates are objects, which write themselves as Jinja for a tokenizer."""
    for name in ("llamafactory", "llamafactory.data", "llamafactory.extras"):
        package = ModuleType(name)
        package.__path__ = [str(REAL.joinpath(*name.split(".")))]  # its modules, without what a package imports first
        sys.modules[name] = package
    plugins: Any = ModuleType("llamafactory.data.mm_plugin")
    plugins.get_mm_plugin = lambda *_, **__: None
    sys.modules[plugins.__name__] = plugins
    for name, template in importlib.import_module("llamafactory.data.template").TEMPLATES.items():
        eos = template.stop_words[0] if template.replace_eos else EOS
        tokenizer = SimpleNamespace(bos_token=BOS, bos_token_id=0, eos_token=eos, eos_token_id=1)
        try:
            text = template._get_jinja_template(tokenizer)
        except ValueError:
            continue  # it says that it cannot write this one as Jinja
        yield PublishedTemplate(
            package="llamafactory", name=name, template=text, eos=eos, stops=tuple(template.stop_words)
        )


def _unsloth() -> Iterator[PublishedTemplate]:
    """The assignments of strings in its chat_templates.py, without what is imported and called beside them."""
    path = REAL / "unsloth" / "chat_templates.py"
    values: dict[str, Any] = {"CHAT_TEMPLATES": {}, "DEFAULT_SYSTEM_MESSAGE": {}, "_ollama_template": lambda _: ""}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.For | ast.Try):
            try:
                exec(compile(ast.Module([node], []), str(path), "exec"), values)
            except (NameError, ImportError, AttributeError, TypeError):
                continue  # it is of functions, not of strings
    for name, (template, stop, *_) in values["CHAT_TEMPLATES"].items():
        stop = stop[1] if isinstance(stop, tuple) else stop
        eos = EOS if stop == "eos_token" else stop
        yield PublishedTemplate(package="unsloth", name=name, template=template, eos=eos)


def _ollama_utils() -> Iterator[PublishedTemplate]:
    """Some names have several templates."""
    count: Counter[str] = Counter()
    for name, text in _OLLAMA.findall(_ollama_file("src/chat-template-automap.ts")):
        count[name] += 1
        numbered = name if count[name] == 1 else f"{name} ({count[name]})"
        # A string of TypeScript without interpolation.
        template = ast.literal_eval(text)
        yield PublishedTemplate(package="@huggingface/ollama-utils", name=numbered, template=template)


def _ollama_file(name: str) -> str:
    packed = next(REAL.glob("huggingface-ollama-utils-*.tgz"), None)
    if packed is None:
        raise FileNotFoundError(f"{REAL}/huggingface-ollama-utils-*.tgz")
    with tarfile.open(packed) as files:
        source = files.extractfile(f"package/{name}")
        assert source is not None
        return source.read().decode()
