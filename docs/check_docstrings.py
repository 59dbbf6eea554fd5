"""Check that docstrings stand alone: none opens with words that need the line before them ("Of the cluster.").

python docs/check_docstrings.py toolkit

Docstrings are those of modules, classes and functions, and the strings below assignments. Each finding is one line, and
any finding makes the exit code 1. The word that a docstring opens with decides. The rule passes complete sentences and
noun phrases, and for that it misses some fragments:

- REFERS (Of, That, Those, Its, Also, …): never passes. The docstring is about something that only another line names.
- NEEDS_A_NOUN (Both, The same): passes before a noun. "Both ranks send." and "The same weights on a CPU." pass; "Both."
  and "The same without norms." do not.
- NEEDS_A_CLAUSE (As, By, In, With, Where, …): begins a phrase or a subordinate clause, behind which a comma and a main
  clause must follow. "Where a layer is frozen, it has no gradient." passes; "Where shards are made." and "By name: …"
  do not. What begins with another such word ("On one line, without colors.") is no main clause.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

REFERS = {
    "also", "and", "but", "its", "of", "or", "so", "than", "that", "their", "them", "then", "these", "they", "those",
    "whose",
}  # fmt: skip
NEEDS_A_NOUN = {"both", "the same"}
NEEDS_A_CLAUSE = {
    "after", "although", "among", "as", "at", "because", "before", "behind", "beside", "besides", "between", "beyond",
    "by", "during", "for", "from", "if", "in", "inside", "instead", "like", "on", "outside", "per", "since", "through",
    "to", "under", "unless", "until", "when", "where", "while", "with", "within", "without",
}  # fmt: skip
_QUANTITIES = {"as few", "as many", "as much", "at least", "at most"}
"""Openings of noun phrases ("At most one rank") by a word that is in NEEDS_A_CLAUSE."""
_NO_NOUNS = NEEDS_A_CLAUSE | {
    "and", "are", "can", "do", "does", "has", "have", "is", "may", "must", "of", "or", "that", "was", "were", "which",
    "who", "will",
}  # fmt: skip
_NO_MAIN_CLAUSE = NEEDS_A_CLAUSE | {"and", "but", "nor", "not", "or", "than", "which", "who", "whose"}
_IGNORED = re.compile(r"`[^`]*`|\([^()]*\)")
"""Code and parentheses, whose words and commas do not count."""
_FIRST_SENTENCE = re.compile(r".*?(?=[.:;](?: |$)|$)")


def fragment(docstring: str) -> str:
    """Return the word or words by which a docstring opens as a fragment; empty if it stands alone."""
    text = _IGNORED.sub("NAME", " ".join(docstring.split()))
    first_sentence = _FIRST_SENTENCE.match(text)
    assert first_sentence is not None
    words = [word.lower().rstrip(",") for word in first_sentence[0].split(" ")]
    size = 2 if words[:2] == ["the", "same"] else 1
    opening, following = " ".join(words[:size]), words[size:]
    if opening in NEEDS_A_NOUN:
        stands_alone = bool(following) and following[0] not in _NO_NOUNS
    elif opening in NEEDS_A_CLAUSE:
        stands_alone = " ".join(words[:2]) in _QUANTITIES or _has_main_clause(first_sentence[0])
    else:
        stands_alone = opening not in REFERS
    return "" if stands_alone else opening.capitalize()


def _has_main_clause(sentence: str) -> bool:
    """Whether something follows a comma that is not another phrase or subordinate clause."""
    clauses = [clause.split() for clause in sentence.split(",")[1:]]
    return any(words[0].lower() not in _NO_MAIN_CLAUSE for words in clauses if words)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring: of every statement that is a string alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def findings(root: Path) -> Iterator[str]:
    """Yield a line for each docstring below a folder, or in a file, that does not stand alone."""
    paths = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    if not paths:
        raise SystemExit(f"{root}: no Python file is in it")
    for path in paths:
        for line, text in sorted(docstrings(path.read_text(encoding="utf-8"))):
            opening = fragment(text)
            if opening:
                yield f'{path}:{line}: a docstring that opens with "{opening}": {" ".join(text.split())[:80]}'


def main(arguments: Sequence[str]) -> int:
    """Print the findings in all files and folders that are named; return the exit code."""
    lines = [line for name in arguments for line in findings(Path(name))]
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
