"""Contrastive items, and the JSON lines they are kept in; docs/contrastive.md describes both."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertfused.errors import UserError
from bertfused.text import open_output, read_lines
from docnmt.records import at

KEYS = ("context", "source", "candidates", "correct", "target_context", "category", "distance")


@dataclass(frozen=True)
class ContrastiveItem:
    """A sentence after some context, with translations of which one is right.

    Attributes:
        correct: Number of the right one among the candidates, from 0.
        context: Source sentences before it, oldest first.
        target_contexts: For each candidate, the target sentences before it, oldest first; empty
            where the item says nothing of the target side.
        category: What the item tests, e.g. "deixis".
        distance: How many sentences before the current one the evidence stands; None if unknown.
    """

    source: str
    candidates: tuple[str, ...]
    correct: int
    context: tuple[str, ...] = ()
    target_contexts: tuple[tuple[str, ...], ...] = ()
    category: str = ""
    distance: int | None = None


def write_contrastive(path: Path, items: Iterable[ContrastiveItem]) -> None:
    """Write items as JSON lines; what an item does not say has no key."""
    with open_output(path) as output:
        for item in items:
            output.write_line(json.dumps(_record_of(item), ensure_ascii=False))


def _record_of(item: ContrastiveItem) -> dict[str, Any]:
    record: dict[str, Any] = {"context": item.context} if item.context else {}
    record |= {"source": item.source, "candidates": item.candidates, "correct": item.correct}
    if item.target_contexts:
        first = item.target_contexts[0]
        is_shared = first and set(item.target_contexts) == {first}
        record["target_context"] = first if is_shared else item.target_contexts
    if item.category:
        record["category"] = item.category
    if item.distance is not None:
        record["distance"] = item.distance
    return record


def read_contrastive(path: Path) -> list[ContrastiveItem]:
    """Read items from JSON lines.

    Raises:
        UserError: If a line is no item, naming the line and what is wrong with it.
    """
    items = []
    for number, line in enumerate(read_lines(path), start=1):
        where = at(path, number)
        record = fields_of(parse_json(line, where), where)
        for key in record:
            if key not in KEYS:
                raise UserError(f"{where}: unknown key {key!r}; the keys are {', '.join(KEYS)}")
        items.append(_item_of(record, where))
    return items


def _item_of(record: dict[str, Any], where: str) -> ContrastiveItem:
    candidates = strings_of(record, "candidates", where)
    given = record.get("target_context", [])
    if isinstance(given, list) and given and all(isinstance(context, list) for context in given):
        contexts = tuple(
            strings_of({"target_context": context}, "target_context", where) for context in given
        )
    else:
        shared = strings_of({"target_context": given}, "target_context", where)
        contexts = (shared,) * len(candidates) if shared else ()
    distance = record.get("distance")
    return checked(
        ContrastiveItem(
            source=string_of(record, "source", where),
            candidates=candidates,
            correct=integer_of(record, "correct", where),
            context=strings_of({"context": [], **record}, "context", where),
            target_contexts=contexts,
            category=string_of({"category": "", **record}, "category", where),
            distance=None if distance is None else integer_of(record, "distance", where),
        ),
        where,
    )


# ---------------------------------------------------------------------------- checks


def checked(item: ContrastiveItem, where: str) -> ContrastiveItem:
    """Return an item that can be scored.

    Raises:
        UserError: If it cannot; ``where`` names its place.
    """
    count = len(item.candidates)
    if count < 2:
        raise UserError(f"{where}: {count} candidate(s), but an item has two or more")
    if not 0 <= item.correct < count:
        raise UserError(
            f"{where}: candidate {item.correct} cannot be the right one of {count}, counted from 0"
        )
    if not item.source.strip():
        raise UserError(f"{where}: the source sentence is blank")
    if not all(candidate.strip() for candidate in item.candidates):
        raise UserError(f"{where}: a candidate is blank")
    if len(item.target_contexts) not in (0, count):
        raise UserError(
            f"{where}: {len(item.target_contexts)} target contexts for {count} candidates"
        )
    if item.distance is not None and item.distance < 0:
        raise UserError(f"{where}: the distance {item.distance} is negative")
    return item


def parse_json(text: str, where: str) -> Any:
    """Parse JSON; ``where`` names its place in messages, as in the functions below."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        raise UserError(f"{where}: not JSON: {error}") from error


def fields_of(value: Any, where: str) -> dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: a JSON object is expected, not {_short(value)}")
    return value


def string_of(record: dict[str, Any], key: str, where: str) -> str:
    """Return a string of a JSON object."""
    value = _value(record, key, where)
    if not isinstance(value, str):
        raise UserError(f"{where}: {key!r} must be a string, not {_short(value)}")
    _check_text(value, key, where)
    return value


def integer_of(record: dict[str, Any], key: str, where: str) -> int:
    """Return a whole number of a JSON object."""
    value = _value(record, key, where)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{where}: {key!r} must be a whole number, not {_short(value)}")
    return value


def strings_of(record: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Return a list of strings of a JSON object."""
    value = _value(record, key, where)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise UserError(f"{where}: {key!r} must be a list of strings, not {_short(value)}")
    for text in value:
        _check_text(text, key, where)
    return tuple(value)


def list_of(record: dict[str, Any], key: str, where: str) -> list[Any]:
    """Return a list of a JSON object."""
    value = _value(record, key, where)
    if not isinstance(value, list):
        raise UserError(f"{where}: {key!r} must be a list, not {_short(value)}")
    return value


def _check_text(text: str, key: str, where: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{where}: {key!r} holds half a surrogate pair")


def _value(record: dict[str, Any], key: str, where: str) -> Any:
    if key not in record:
        raise UserError(f"{where}: {key!r} is missing")
    return record[key]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
