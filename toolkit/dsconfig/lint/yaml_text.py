"""YAML with places, and with the values that accelerate sees.

accelerate reads its config with PyYAML's safe loader, that is as YAML 1.1: an unquoted `no` is false, `1e-4` is a text.
"""

from collections.abc import Iterator
from typing import Any

import yaml

from toolkit.dsconfig.lint.document import MAX_DEPTH, Document, Span, bad_text
from toolkit.dsconfig.lint.finding import Found, Path, dotted

# libyaml's parser is much faster; both produce the same events.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str, file: str) -> Document:
    """Read one document. Raises NotAConfigError for what is no YAML, or uses more of it than a config needs."""
    try:
        return _Reader(text, file).read()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        offset = mark.index if mark else 0
        details = " ".join(", ".join(part for part in (error.context, error.problem) if part).split())
        raise bad_text(file, text, offset, f"not YAML: {details}.") from None
    except yaml.YAMLError as error:
        raise bad_text(file, text, 0, f"not YAML: {' '.join(str(error).split())[:120]}.") from None


class _Reader:
    """Recursive descent over the parser's events; depth is bounded, so is the stack."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.document = Document(file=file, text=text, syntax="yaml")
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))
        self.scalars = yaml.SafeLoader("")
        self.anchors: dict[str, Any] = {}

    def read(self) -> Document:
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._bad(event, "a second document begins here. A config file holds one.")
                self.document.value = self._node(next(self.events), (), None)
        return self.document

    def _bad(self, event: Any, message: str) -> Exception:
        return bad_text(self.file, self.text, _offset(event.start_mark), message)

    def _node(self, event: Any, path: Path, key: Any) -> Any:
        if len(path) > MAX_DEPTH:
            raise self._bad(event, f"nested deeper than {MAX_DEPTH} levels. A config of accelerate has 3.")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise self._bad(event, f"*{event.anchor} is used before &{event.anchor} is given.")
            value, end = self.anchors[event.anchor], _offset(event.end_mark)
        elif isinstance(event, yaml.MappingStartEvent):
            value, end = self._mapping(path)
        elif isinstance(event, yaml.SequenceStartEvent):
            value, end = self._sequence(path)
        else:
            value, end = self._scalar(event), _offset(event.end_mark)
        if getattr(event, "anchor", None):
            self.anchors[event.anchor] = value
        start = _offset(event.start_mark)
        if key is None:
            self.document.spans[path] = Span(start, start, start, end)
        else:
            self.document.spans[path] = Span(_offset(key.start_mark), _offset(key.end_mark), start, end)
        return value

    def _sequence(self, path: Path) -> tuple[list[Any], int]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items)), None))
        return items, _offset(event.end_mark)

    def _mapping(self, path: Path) -> tuple[dict[str, Any], int]:
        entries: dict[str, Any] = {}
        end = 0
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self._bad(event, "a key must be a plain name. Write `name: value`.")
            name: str = event.value
            if name == "<<":
                raise self._bad(event, "merge keys (<<) are not read here. Write the fields out.")
            here = (*path, name)
            if name in entries:
                first = self.document.mark(self.document.spans[here].key).line
                message = f"{dotted(here)} is given twice, first on line {first}"
                self.document.found.append((_offset(event.start_mark), Found("DS005", here, message)))
            entries[name] = self._node(next(self.events), here, event)
            end = self.document.spans[here].end
        opened, closed = _offset(event.start_mark), _offset(event.end_mark)
        return entries, end if opened == closed else closed  # a block ends where its last value does

    def _scalar(self, event: Any) -> Any:
        tag = event.tag or self.scalars.resolve(  # type: ignore[no-untyped-call]
            yaml.ScalarNode, event.value, event.implicit
        )
        node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
        try:
            value = self.scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError):
            raise self._bad(event, "this value cannot be read. Put it into quotes if it is a text.") from None
        return value if isinstance(value, (str, int, float, bool, type(None))) else event.value


def _offset(mark: Any) -> int:
    offset: int = mark.index
    return offset
