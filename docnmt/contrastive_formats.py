"""Read contrastive test sets in the formats they are published in; docs/contrastive.md has all.

A set is named by one file: the JSON or JSON lines that hold it, or, where it is several text
files, the one of the source sentences; the others are found beside it by their names.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from bertfused.errors import UserError
from bertfused.text import read_lines
from docnmt.contrastive import (
    ContrastiveItem,
    checked,
    fields_of,
    integer_of,
    list_of,
    parse_json,
    read_contrastive,
    string_of,
    strings_of,
)

SetFormat = Literal["voita", "contrapro", "discevalmt", "klines", "jsonl"]

EOS = " _eos "  # between the sentences of Voita's strings
_COMPRESSED = r"(?:\.gz|\.zst)?"
_TEXT_NAME = re.compile(rf"(.+)\.(text|current)\.([^.]+){_COMPRESSED}")


def read_set(path: Path, format: SetFormat | None = None) -> list[ContrastiveItem]:
    """Read a contrastive test set.

    Args:
        format: Its format; None tells it from the names of the files, or from the JSON.

    Raises:
        UserError: If the format cannot be told, or a file is not as it must be.
    """
    if not path.exists() or path.is_dir():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}; name the JSON of a set, or its file of source sentences")
    format = format or guess_format(path)
    is_json = path.name.removesuffix(".gz").removesuffix(".zst").endswith(".json")
    if format == "jsonl":
        items = read_contrastive(path)
    elif format == "voita":
        items = _read_voita(path)
    elif format == "contrapro":
        items = _read_contrapro_json(path) if is_json else _read_contrapro_text(path)
    elif format == "discevalmt" and is_json:
        items = _read_discevalmt_json(path)
    else:
        items = _read_pairs(path, format)
    if not items:
        raise UserError(f"{path} has no items")
    return items


def guess_format(path: Path) -> SetFormat:
    """Tell the format of a set.

    Raises:
        UserError: If it could be several, or none.
    """
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".jsonl"):
        return "jsonl"
    if name.endswith(".json"):
        return _guess_json(path)
    if match := _TEXT_NAME.fullmatch(path.name):
        stem, part, language = match.groups()
        if part == "text":
            return "contrapro"
        if _beside(path, re.escape(f"{stem}.prev.{language}")):
            return "discevalmt"
        if _contexts_beside(path, stem, language):
            return "klines"
    elif name.endswith((".src", ".dst")):
        raise UserError(
            f"{path}: flattened sets do not say which candidate is right; name the JSON of the set"
        )
    raise UserError(
        f"{path}: the name does not tell the format; give --format {'|'.join(get_args(SetFormat))}"
    )


def _guess_json(path: Path) -> SetFormat:
    content = _read_json(path)
    if isinstance(content, dict):
        return "discevalmt"
    first = content[0] if isinstance(content, list) and content else None
    if isinstance(first, dict) and "dst" in first:
        return "voita"
    if isinstance(first, dict) and "errors" in first:
        return "contrapro"
    raise UserError(f"{path} is no contrastive set: neither Voita's, ContraPro's nor DiscEvalMT's")


# ---------------------------------------------------------------------------- JSON


def _read_json(path: Path) -> Any:
    return parse_json("\n".join(read_lines(path)), str(path))


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON list, each with the name of its place."""
    content = _read_json(path)
    if not isinstance(content, list):
        raise UserError(f"{path}: a JSON list is expected")
    for number, value in enumerate(content, start=1):
        where = f"{path}, item {number}"
        yield where, fields_of(value, where)


def _read_voita(path: Path) -> list[ContrastiveItem]:
    """Read Voita et al. (2019): src and each dst are sentences joined by " _eos "."""
    items = []
    for where, record in _records(path):
        *context, source = _sentences(string_of(record, "src", where), where)
        documents = [_sentences(text, where) for text in strings_of(record, "dst", where)]
        for sentences in documents:
            if len(sentences) != len(context) + 1:
                raise UserError(
                    f"{where}: {len(context) + 1} source sentences but {len(sentences)} of a "
                    "translation"
                )
        item = ContrastiveItem(
            source=source,
            candidates=tuple(sentences[-1] for sentences in documents),
            correct=integer_of(record, "true_ind", where),
            context=tuple(context),
            target_contexts=tuple(tuple(sentences[:-1]) for sentences in documents),
            distance=integer_of(record, "ctx_dist", where) if "ctx_dist" in record else None,
        )
        items.append(checked(item, where))
    return items


def _sentences(text: str, where: str) -> list[str]:
    sentences = text.split(EOS)
    if any(not sentence.strip() or EOS.strip() in sentence.split() for sentence in sentences):
        raise UserError(f"{where}: a blank sentence beside _eos")
    return sentences


class _ContraProRecord(NamedTuple):
    """An entry of ContraPro's JSON; it has no context sentences."""

    source: str
    candidates: tuple[str, ...]  # the reference, then its contrastives
    category: str
    distance: int | None


def _contrapro_records(path: Path) -> list[_ContraProRecord]:
    """Read Müller et al. (2018), or the same made for En-Fr, where the distance -1 is none."""
    records = []
    for where, record in _records(path):
        errors = [fields_of(error, where) for error in list_of(record, "errors", where)]
        pronouns = [string_of(record, f"{side} pronoun", where) for side in ("src", "ref")]
        distance = integer_of(record, "ante distance", where)
        records.append(
            _ContraProRecord(
                string_of(record, "src segment", where),
                (
                    string_of(record, "ref segment", where),
                    *(string_of(error, "contrastive", where) for error in errors),
                ),
                ":".join(pronouns).lower(),
                distance if distance >= 0 else None,
            )
        )
    return records


def _read_contrapro_json(path: Path) -> list[ContrastiveItem]:
    return [
        checked(
            ContrastiveItem(
                record.source,
                record.candidates,
                0,
                category=record.category,
                distance=record.distance,
            ),
            f"{path}, item {number}",
        )
        for number, record in enumerate(_contrapro_records(path), start=1)
    ]


def _read_discevalmt_json(path: Path) -> list[ContrastiveItem]:
    """Read Bawden et al. (2018): blocks of examples, each of which has one of two layouts."""
    items = []
    blocks = fields_of(_read_json(path), str(path))
    for name, value in blocks.items():
        where = f"{path}, block {name!r}"
        block = fields_of(value, where)
        if "examples" in block:  # lexical choice
            examples = [fields_of(entry, where) for entry in list_of(block, "examples", where)]
            category = string_of({"type": "", **block}, "type", where)
            found = [
                (strings_of(example, "src", where), fields_of(example.get("trg"), where), category)
                for example in examples
            ]
        else:  # anaphora
            source = strings_of(block, "src", where)
            targets = [fields_of(entry, where) for entry in list_of(block, "trg", where)]
            found = [
                (source, target, string_of({"type": "", **target}, "type", where))
                for target in targets
            ]
        items += [_discevalmt_item(*parts, where) for parts in found]
    return items


def _discevalmt_item(
    source: tuple[str, ...], target: dict[str, Any], category: str, where: str
) -> ContrastiveItem:
    right = strings_of(target, "semi-correct" if "semi-correct" in target else "correct", where)
    wrong = strings_of(target, "incorrect", where)
    for sentences in (source, right, wrong):
        if len(sentences) != 2:
            raise UserError(
                f"{where}: {len(sentences)} sentences where the previous and the current stand"
            )
    item = ContrastiveItem(
        source=source[1],
        candidates=(right[1], wrong[1]),
        correct=0,
        context=source[:1],
        target_contexts=(right[:1], wrong[:1]),
        category=category,
        distance=1,
    )
    return checked(item, where)


# ---------------------------------------------------------------------------- text


class _Line(NamedTuple):
    """A candidate: one line of a set's text files, with its lines of context."""

    number: int
    source: str
    target: str
    context: tuple[str, ...]
    target_context: tuple[str, ...]

    def has_sources_of(self, other: "_Line") -> bool:
        return (self.source, self.context) == (other.source, other.context)


def _read_pairs(path: Path, format: SetFormat) -> list[ContrastiveItem]:
    """Read a right and a wrong translation of each sentence, in turn."""
    lines = _read_text(path, format)
    if len(lines) % 2:
        raise UserError(f"{path} has {len(lines):,} lines, but right and wrong ones come in pairs")
    for right, wrong in zip(lines[::2], lines[1::2], strict=True):
        if not wrong.has_sources_of(right):
            raise _not_one_source(path, right, wrong)
    distance = 1 if format == "discevalmt" else None
    return [
        _item_of(path, lines[start : start + 2], distance=distance)
        for start in range(0, len(lines), 2)
    ]


def _read_contrapro_text(path: Path) -> list[ContrastiveItem]:
    """Read references each with its contrastives after it.

    The set's JSON beside them says how many, and gives categories and distances. Without it, an
    item ends where another source or context begins, or where the reference stands again.
    """
    lines = _read_text(path, "contrapro")
    match = _TEXT_NAME.fullmatch(path.name)
    assert match is not None  # or _read_text had failed
    beside = _beside(path, re.escape(f"{match[1]}.json"))
    if not beside:
        return [_item_of(path, group) for group in _groups(lines)]
    found = beside[0]
    records = _contrapro_records(found)
    wanted = sum(len(record.candidates) for record in records)
    if wanted != len(lines):
        raise UserError(f"{path} has {len(lines):,} lines, but {found} has {wanted:,} candidates")
    items, start = [], 0
    for record in records:
        group = lines[start : start + len(record.candidates)]
        for line in group[1:]:
            if not line.has_sources_of(group[0]):
                raise _not_one_source(path, group[0], line)
        items.append(_item_of(path, group, category=record.category, distance=record.distance))
        start += len(group)
    return items


def _groups(lines: Sequence[_Line]) -> Iterator[list[_Line]]:
    group: list[_Line] = []
    for line in lines:
        if group and (line.target == group[0].target or not line.has_sources_of(group[0])):
            yield group
            group = []
        group.append(line)
    if group:
        yield group


def _item_of(
    path: Path, group: Sequence[_Line], *, category: str = "", distance: int | None = None
) -> ContrastiveItem:
    first = group[0]
    item = ContrastiveItem(
        source=first.source,
        candidates=tuple(line.target for line in group),
        correct=0,
        context=first.context,
        target_contexts=tuple(line.target_context for line in group),
        category=category,
        distance=distance,
    )
    return checked(item, f"{path}, line {first.number}")


def _not_one_source(path: Path, first: _Line, other: _Line) -> UserError:
    what = "source sentences" if first.source != other.source else "source contexts"
    return UserError(
        f"{path}: lines {first.number} and {other.number} have different {what}, but their "
        f"translations belong together; is {path.name} the source side?"
    )


def _read_text(path: Path, format: SetFormat) -> list[_Line]:
    """Read the four text files of a set; a line has as many context lines as all others."""
    match = _TEXT_NAME.fullmatch(path.name)
    if match is None:
        raise UserError(
            f"{path}: a set in text is named by its source sentences, "
            f"NAME.{'text' if format == 'contrapro' else 'current'}.LANGUAGE"
        )
    stem, part, language = match.groups()
    others = _beside(path, rf"{re.escape(stem)}\.{part}\.[^.]+")
    others.remove(path)
    if len(others) != 1:
        names = ", ".join(other.name for other in others) or "none"
        raise UserError(
            f"{path}: one file {stem}.{part}.* of translations is wanted; found: {names}"
        )
    target = others[0]
    target_match = _TEXT_NAME.fullmatch(target.name)
    assert target_match is not None
    sides = (language, target_match[3])
    contexts = [_context_file(path, stem, side, format) for side in sides]
    sources, targets = list(read_lines(path)), list(read_lines(target))
    if len(sources) != len(targets):
        raise UserError(f"{path} has {len(sources):,} lines but {target} has {len(targets):,}")
    windows = [_windows(context, path, len(sources)) for context in contexts]
    rows = zip(sources, targets, *windows, strict=True)
    return [_Line(number, *row) for number, row in enumerate(rows, start=1)]


def _context_file(path: Path, stem: str, language: str, format: SetFormat) -> Path:
    if format == "discevalmt":
        wanted = f"{stem}.prev.{language}"
        found = _beside(path, re.escape(wanted))
    else:
        wanted = f"{stem}.context.{language}"
        found = _contexts_beside(path, stem, language)
    if not found:
        raise UserError(f"{path}: {wanted}, its context sentences, is not beside it")
    return found[-1]


def _windows(context: Path, path: Path, count: int) -> list[tuple[str, ...]]:
    """Cut a context file into equal parts, one for each line, without leading blank lines."""
    lines = list(read_lines(context))
    if not count and not lines:
        return []
    if not count or len(lines) % count or not lines:
        raise UserError(
            f"{context} has {len(lines):,} lines, no multiple of the {count:,} of {path}"
        )
    size = len(lines) // count
    windows = []
    for start in range(0, len(lines), size):
        window = lines[start : start + size]
        while window and not window[0].strip():  # the document begins here
            del window[0]
        windows.append(tuple(window))
    return windows


def _contexts_beside(path: Path, stem: str, language: str) -> list[Path]:
    """Find context files; where one has k lines a sentence by name, the longest comes last."""
    name, suffix = re.escape(stem), re.escape(language)
    counted = _beside(path, rf"{name}\.c\d+\.context\.{suffix}")
    counted.sort(key=lambda found: int(found.name[len(stem) + 2 :].partition(".")[0]))
    return counted + _beside(path, rf"{name}\.context\.{suffix}")


def _beside(path: Path, pattern: str) -> list[Path]:
    """Find files in the folder of another by their whole names, compressed or not."""
    regex = re.compile(pattern + _COMPRESSED)
    return sorted(found for found in path.parent.iterdir() if regex.fullmatch(found.name))
