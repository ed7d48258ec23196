"""The dictionary: symbols, their numbers and counts, in fairseq's ``dict.txt`` format."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from bertfused.errors import UserError
from bertfused.text import read_lines, replace_file

#: The tag that stands for a masked token, in the dictionaries of models that have one.
MASK = "<mask>"

_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_OVERWRITE = "#fairseq:overwrite"
_TAG = -1  # the count of a tag


class Vocabulary:
    """Symbols numbered as fairseq numbers them: four special ones, then the lines of the file.

    The special symbols are found by number only. Text that reads ``</s>`` is an ordinary symbol:
    unknown, unless the dictionary has a line for it. Tags, which mark the corpus a sentence is of,
    are found by `tags` only; in the file their count is -1.

    Args:
        symbols: The ordinary symbols; the first gets number 4.
        counts: How often each occurs in the training text; -1 makes it a tag.

    Attributes:
        symbols: All symbols by number, special ones included.
        counts: The counts beside them; 0 for special symbols.
        tags: Numbers of the tags.

    Example:
        >>> v = Vocabulary(["the", "cat"], [7, 2])
        >>> v.symbols[4], v.id_of("cat"), v.id_of("dog") == v.unk
        ('the', 5, True)
    """

    bos, pad, eos, unk = range(4)

    def __init__(self, symbols: Iterable[str], counts: Iterable[int]):
        ordinary, ordinary_counts = tuple(symbols), tuple(counts)
        if len(ordinary) != len(ordinary_counts):
            raise ValueError(f"{len(ordinary)} symbols but {len(ordinary_counts)} counts")
        self.symbols = _SPECIALS + ordinary
        self.counts = (0,) * len(_SPECIALS) + ordinary_counts
        # Of a symbol that occurs twice the later number counts, as in fairseq.
        self._ids = {symbol: id for id, symbol in enumerate(ordinary, start=len(_SPECIALS))}
        names = [
            symbol for symbol, count in zip(ordinary, ordinary_counts, strict=True) if count == _TAG
        ]
        self.tags = {name: self._ids.pop(name) for name in names}

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def ordinary(self) -> list[int]:
        """Numbers of the symbols that text has: neither special ones nor tags."""
        tags = {*self.tags.values()}
        return [id for id in range(len(_SPECIALS), len(self)) if id not in tags]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self.symbols == other.symbols and self.counts == other.counts

    def __hash__(self) -> int:
        return hash(self.symbols)

    def id_of(self, symbol: str) -> int:
        """Return the number of a symbol of the text, `unk` when there is none."""
        return self._ids.get(symbol, self.unk)

    @classmethod
    def from_counts(
        cls, counts: Counter[str], pad_to: int = 8, tags: Sequence[str] = ()
    ) -> "Vocabulary":
        """Order symbols by falling count, then by code point, and pad with unused ones.

        Args:
            counts: Symbols of the training text; a count of 0 keeps a symbol.
            pad_to: The total, special symbols included, becomes a multiple of this.
            tags: Follow the symbols of the text.

        Raises:
            UserError: If a tag is a symbol of the text, or special.
        """
        for tag in tags:
            if tag in counts or tag in _SPECIALS:
                raise UserError(f"{tag!r} cannot be a tag: it is a symbol of the text or special")
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        ordered += [(tag, _TAG) for tag in tags]
        symbols = [symbol for symbol, _ in ordered]
        missing = -(len(_SPECIALS) + len(symbols)) % pad_to
        number = 0
        while missing:
            filler = f"madeupword{number:04d}"
            if filler not in counts:
                symbols.append(filler)
                missing -= 1
            number += 1
        padding = [0] * (len(symbols) - len(ordered))
        return cls(symbols, [count for _, count in ordered] + padding)

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Read a ``dict.txt``.

        Raises:
            UserError: If a line is malformed, or repeats a symbol without saying that it should.
        """
        line_of = dict.fromkeys(_SPECIALS, 0)
        symbols, counts = [], []
        for number, line in enumerate(read_lines(path, keep_bom=True), start=1):
            symbol, count, overwrites = _parse(line, f"{path}, line {number}")
            if symbol in line_of and not overwrites:
                first = f"stands in line {line_of[symbol]}" if line_of[symbol] else "is special"
                raise UserError(f"{path}, line {number}: {symbol!r} already {first}")
            line_of[symbol] = number
            symbols.append(symbol)
            counts.append(count)
        return cls(symbols, counts)

    def save(self, path: Path) -> None:
        """Write a ``dict.txt``."""
        with replace_file(path) as handle:
            handle.write(self._serialise())

    @property
    def sha256(self) -> str:
        """SHA-256 of the file that `save` writes."""
        return hashlib.sha256(self._serialise()).hexdigest()

    def _serialise(self) -> bytes:
        lines, seen = [], set(_SPECIALS)
        for symbol, count in zip(self.symbols[4:], self.counts[4:], strict=True):
            if "\n" in symbol:
                raise ValueError(f"a symbol cannot hold a line feed: {symbol!r}")
            lines.append(f"{symbol} {count}{f' {_OVERWRITE}' if symbol in seen else ''}\n")
            seen.add(symbol)
        return "".join(lines).encode("utf-8")


def _parse(line: str, place: str) -> tuple[str, int, bool]:
    """Split ``symbol count [#fairseq:overwrite]``."""
    # fairseq strips the end of a line of all white space, its symbols never end in any
    rest = line.rstrip()
    overwrites = rest.endswith(f" {_OVERWRITE}")
    symbol, space, count = rest.removesuffix(f" {_OVERWRITE}").rpartition(" ")
    if not space or not count.removeprefix("-").isdecimal():
        raise UserError(f"{place}: {line!r} is not '<symbol> <count>'")
    return symbol, int(count), overwrites
