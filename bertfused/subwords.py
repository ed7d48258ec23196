"""Text to numbers and back; the owner of sentencepiece and subword-nmt.

Three ways to split a line, each with a file of its own beside ``dict.<language>.txt``:

- ``sentencepiece``: raw text. Nothing is normalised and what the model has not seen is spelled in
  bytes, so decoding returns the text to the last space.
- ``bpe``: pre-tokenised text and subword-nmt's codes; ``@@`` at the end of a symbol joins it to
  the next one.
- ``words``: pre-tokenised text as it is, as in a data folder of fairseq. It has no file.

The last two split at white space as fairseq does, so runs of spaces are not kept.
"""

import hashlib
import io
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Literal, cast

import sentencepiece

from bertfused.errors import UserError
from bertfused.text import read_lines, replace_file
from bertfused.vocab import Vocabulary

Kind = Literal["sentencepiece", "bpe", "words"]
UNKNOWN = "\u2047"  # what an unknown symbol prints: a double question mark

_SPACE = "\u2581"  # how sentencepiece writes a space
# Not learned but spelled in bytes: white space that fairseq's tools would split a symbol at,
# controls, and the three characters that sentencepiece keeps for itself (it would skip the line).
_UNLEARNED = re.compile(r"[^\S ]|[\x00-\x1f\x7f-\x9f\u2581\u2585]")
_MAX_TRAINING_LINES = 500_000
_MAX_CACHED_WORDS = 500_000
_MANY = 10_000  # characters

_Encoder = Callable[[Sequence[str]], list[list[int]]]
_logger = logging.getLogger(__name__)


class SentencePieces:
    """A sentencepiece model.

    Args:
        model: Content of a ``.model`` file.
    """

    kind: Kind = "sentencepiece"

    def __init__(self, model: bytes):
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        number = self._processor.get_piece_size()
        self._pieces: list[str] = [self._processor.id_to_piece(i) for i in range(number)]
        self._bytes = {
            piece: bytes([int(piece[3:5], 16)])
            for i, piece in enumerate(self._pieces)
            if self._processor.is_byte(i)
        }
        # Models of others may not write a space before the first word.
        self._adds_space = self._processor.normalize("a").startswith(_SPACE)

    def split(self, line: str) -> list[str]:
        """Split a line into symbols."""
        return [self._pieces[i] for i in self._numbers(line)]

    def join(self, symbols: Iterable[str]) -> str:
        """Undo `split`."""
        content = b"".join(
            self._bytes.get(symbol) or symbol.replace(_SPACE, " ").encode() for symbol in symbols
        )
        # A line feed can only come from a model that spells it; it would end the record.
        text = content.replace(b"\n", b" ").decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._adds_space else text

    def encoder(self, vocabulary: Vocabulary) -> _Encoder:
        """Return the function from lines to numbers of the vocabulary."""
        table = [
            vocabulary.unk if self._is_special(i) else vocabulary.id_of(piece)
            for i, piece in enumerate(self._pieces)
        ]
        return partial(self._renumbered, table)

    def known_symbols(self) -> list[str]:
        """Return what belongs into a dictionary even if no training text has it."""
        return [piece for i, piece in enumerate(self._pieces) if not self._is_special(i)]

    def serialise(self) -> bytes:
        """Return the content of the model file."""
        return self._model

    def _is_special(self, i: int) -> bool:
        return bool(self._processor.is_control(i) or self._processor.is_unknown(i))

    def _renumbered(self, table: list[int], lines: Sequence[str]) -> list[list[int]]:
        return [[table[i] for i in self._numbers(line)] for line in lines]

    def _numbers(self, line: str) -> list[int]:
        """Number pieces as the model does."""
        if _SPACE in line and self._bytes:
            return self._with_space_sign(line)
        return cast(list[int], self._processor.encode(line))

    def _with_space_sign(self, line: str) -> list[int]:
        """Number the pieces of a line with U+2581, which the model would take for a space.

        A character that neither the line nor the model knows takes its place, and the bytes that
        spell it are replaced by those of U+2581.
        """
        processor = self._processor
        stand_in = next(
            c
            for c in map(chr, range(0xF0000, 0xFFFFE))  # private use
            if c not in line and processor.is_unknown(processor.piece_to_id(c))
        )
        old, new = self._spelled(stand_in), self._spelled(_SPACE)
        numbers = processor.encode(line.replace(_SPACE, stand_in))
        result: list[int] = []
        i = 0
        while i < len(numbers):
            is_stand_in = numbers[i : i + len(old)] == old
            result += new if is_stand_in else [numbers[i]]
            i += len(old) if is_stand_in else 1
        return result

    def _spelled(self, character: str) -> list[int]:
        return [self._processor.piece_to_id(f"<0x{b:02X}>") for b in character.encode()]


class BytePairs:
    """Byte-pair codes of subword-nmt.

    Args:
        codes: Lines of a codes file.

    Raises:
        UserError: If a line is malformed or subword-nmt is not installed.
    """

    kind: Kind = "bpe"

    def __init__(self, codes: Sequence[str], name: str = "bpe codes"):
        _check_codes(codes, name)
        self._codes = list(codes)
        self._bpe = _import_subword_nmt("apply_bpe").BPE(io.StringIO("\n".join(codes)))

    def split(self, line: str) -> list[str]:
        if len(self._bpe.cache) > _MAX_CACHED_WORDS:
            self._bpe.cache.clear()
        return cast(list[str], self._bpe.segment_tokens(line.split()))

    def join(self, symbols: Iterable[str]) -> str:
        return f"{' '.join(symbols)} ".replace("@@ ", "").removesuffix(" ")

    def encoder(self, vocabulary: Vocabulary) -> _Encoder:
        return partial(_look_up, self, vocabulary)

    def known_symbols(self) -> list[str]:
        return []

    def serialise(self) -> bytes:
        return "".join(f"{line}\n" for line in self._codes).encode()


class Words:
    """Text that is already split into the symbols of the dictionary."""

    kind: Kind = "words"

    def split(self, line: str) -> list[str]:
        return line.split()

    def join(self, symbols: Iterable[str]) -> str:
        return " ".join(symbols)

    def encoder(self, vocabulary: Vocabulary) -> _Encoder:
        return partial(_look_up, self, vocabulary)

    def known_symbols(self) -> list[str]:
        return []

    def serialise(self) -> bytes:
        return b""


Subwords = SentencePieces | BytePairs | Words


class Tokenizer:
    """Turns lines into numbers of a vocabulary and back.

    Args:
        subwords: How lines are split.
        vocabulary: How symbols are numbered.
    """

    def __init__(self, subwords: Subwords, vocabulary: Vocabulary):
        self.subwords = subwords
        self.vocabulary = vocabulary
        self._encode = subwords.encoder(vocabulary)
        self._tags = frozenset(vocabulary.tags.values())

    def encode(self, line: str) -> list[int]:
        """Return the numbers of a line, without an end symbol. No text gives a special one."""
        return self._encode([line])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Encode many lines."""
        return self._encode(lines)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of numbers; unknown ones print `UNKNOWN`, special ones, tags nothing."""
        return self.subwords.join(self._printed(ids))

    @property
    def sha256(self) -> str:
        """Fingerprint of the subword model and the dictionary."""
        content = [self.subwords.kind.encode(), self.subwords.serialise()]
        return hashlib.sha256(b"\0".join([*content, self.vocabulary.sha256.encode()])).hexdigest()

    def save(self, folder: Path, language: str) -> None:
        """Write the subword model and ``dict.<language>.txt``."""
        for kind, path in _model_files(folder, language).items():
            if kind == self.subwords.kind:
                with replace_file(path) as handle:
                    handle.write(self.subwords.serialise())
            else:
                path.unlink(missing_ok=True)  # or it would be loaded too
        self.vocabulary.save(folder / f"dict.{language}.txt")

    def _printed(self, ids: Iterable[int]) -> Iterator[str]:
        for id in ids:
            if id == self.vocabulary.unk:
                yield UNKNOWN
            elif id > self.vocabulary.unk and id not in self._tags:
                yield self.vocabulary.symbols[id]


def load_tokenizer(folder: Path, language: str) -> Tokenizer:
    """Load what `Tokenizer.save` wrote; a dictionary without a subword model means words.

    Raises:
        UserError: If a file is missing or damaged.
    """
    vocabulary = Vocabulary.load(folder / f"dict.{language}.txt")
    found = {k: path for k, path in _model_files(folder, language).items() if path.exists()}
    if len(found) > 1:
        names = " and ".join(path.name for path in found.values())
        raise UserError(f"{folder} has {names}; one of them has to go")
    for kind, path in found.items():
        return Tokenizer(load_subwords(kind, path), vocabulary)
    return Tokenizer(Words(), vocabulary)


def load_subwords(kind: Kind, path: Path) -> Subwords:
    """Load a subword model, one of others included.

    Raises:
        UserError: If the file is missing or damaged.
    """
    if kind == "words":
        return Words()
    if kind == "bpe":
        return BytePairs(list(read_lines(path)), name=str(path))
    try:
        model = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    with suppress(RuntimeError):
        if model:  # of nothing the library makes a model that knows nothing
            return SentencePieces(model)
    raise UserError(f"{path} is not a sentencepiece model")


def train_subwords(
    kind: Kind,
    files: Mapping[str, Sequence[Path]],
    size: int | None,
    folder: Path,
    *,
    shared: bool = True,
    tags: Sequence[str] = (),
) -> dict[str, Tokenizer]:
    """Learn subwords and dictionaries, and save them.

    Equal texts give equal files.

    Args:
        kind: How to split.
        files: The training text of each language.
        size: sentencepiece: entries of the dictionary, its four special symbols included; bpe:
            merges; words: entries at most, None for all words of the text.
        folder: An existing folder.
        shared: Learn one model from all languages together; else one for each.
        tags: Added to the dictionaries, beyond the size.

    Raises:
        UserError: If the size does not suit the text, or a tag is a symbol of it.
    """
    groups = [list(files)] if shared else [[language] for language in files]
    tokenizers = {}
    for languages in groups:
        texts = [path for language in languages for path in files[language]]
        subwords = _learn(kind, texts, size)
        vocabulary = build_vocabulary(subwords, texts, size if kind == "words" else None, tags)
        for language in languages:
            tokenizers[language] = Tokenizer(subwords, vocabulary)
            tokenizers[language].save(folder, language)
    return tokenizers


def build_vocabulary(
    subwords: Subwords, texts: Sequence[Path], size: int | None = None, tags: Sequence[str] = ()
) -> Vocabulary:
    """Count the symbols of texts.

    Args:
        subwords: How to split.
        texts: Files to count in.
        size: Entries at most, the special symbols included and the tags not, the most frequent
            first.
        tags: Symbols that no text gives.
    """
    counts = Counter(dict.fromkeys(subwords.known_symbols(), 0))
    for path in texts:
        for line in read_lines(path):
            counts.update(subwords.split(line))
    if size is not None:
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        counts = Counter(dict(ordered[: max(0, size - 4)]))
    return Vocabulary.from_counts(counts, tags=tags)


def _learn(kind: Kind, texts: Sequence[Path], size: int | None) -> Subwords:
    if kind == "words":
        return Words()
    if size is None or not 0 < size < 2**31:
        raise UserError(
            f"subwords of kind {kind!r} need a size from 1 to {2**31 - 1:,}, not {size}"
        )
    return _learn_pieces(texts, size) if kind == "sentencepiece" else _learn_pairs(texts, size)


def _learn_pieces(texts: Sequence[Path], size: int) -> SentencePieces:
    # The whole text is read first: the trainer turns an error of its input into one of its own.
    number = sum(1 for path in texts for line in read_lines(path) if line)
    step = -(-number // _MAX_TRAINING_LINES) or 1
    if step > 1:
        _logger.info("subwords are learned from every %d-th of %d lines", step, number)
    lines = islice(chain.from_iterable(read_lines(path) for path in texts), 0, None, step)
    cleaned = (_UNLEARNED.sub(" ", line) for line in lines)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain.from_iterable(map(_cut_at_spaces, cleaned)),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            byte_fallback=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            max_sentence_length=2**30,  # bytes; longer lines would be left out
            num_threads=8,  # sums are taken thread by thread: another number, another model
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(error, texts, size) from error
    return SentencePieces(model.getvalue())


def _cut_at_spaces(line: str) -> Iterator[str]:
    """Cut a very long line into parts, each but the last the first ``_MANY`` characters or more.

    The trainer's time grows with the square of the longest text that comes twice, as in a line
    that repeats one word.
    """
    start = 0
    while (space := line.find(" ", start + _MANY)) >= 0:
        yield line[start:space]
        start = space + 1
    yield line[start:]


def _explained(error: RuntimeError, texts: Sequence[Path], size: int) -> Exception:
    """Say which sizes the text allows, as the trainer found."""
    where = f"the text in {', '.join(map(str, texts))}"
    if largest := re.search(r"size too high .* <= (\d+)", str(error)):
        return UserError(f"subwords.size is {size}, but {where} allows {largest[1]} at most")
    if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
        return UserError(f"subwords.size is {size}, but {where} needs {smallest[1]} at least")
    if "insert_id" in str(error):  # no room even for the special symbols
        return UserError(f"subwords.size is {size}, but 261 is the least for any text")
    if "!sentences_.empty()" in str(error):
        return UserError(f"there is nothing to learn subwords from in {where}")
    return error


def _learn_pairs(texts: Sequence[Path], size: int) -> BytePairs:
    words: Counter[str] = Counter()
    for path in texts:
        for line in read_lines(path):
            words.update(line.split())
    codes = io.StringIO()
    # Its progress bar, and its way to fail when no pair is left: max() of nothing.
    with redirect_stderr(io.StringIO()), suppress(ValueError):
        _import_subword_nmt("learn_bpe").learn_bpe(
            [f"{word} {count}" for word, count in words.items()], codes, size, is_dict=True
        )
    learned = codes.getvalue().removesuffix("\n").split("\n")
    if len(learned) - 1 < size:
        raise UserError(
            f"subwords.size is {size}, but the text in {', '.join(map(str, texts))} "
            f"allows {len(learned) - 1} merges at most"
        )
    return BytePairs(learned)


def _check_codes(codes: Sequence[str], name: str) -> None:
    first = 1 if codes and codes[0].startswith("#version:") else 0
    if not codes[first:]:
        raise UserError(f"{name} has no pairs of symbols")
    for number, line in enumerate(codes[first:], start=first + 1):
        if len(line.strip("\r\n ").split(" ")) != 2:
            raise UserError(f"{name}, line {number}: {line!r} is not a pair of symbols")


def _import_subword_nmt(module: str) -> ModuleType:
    try:
        import subword_nmt.apply_bpe
        import subword_nmt.learn_bpe
    except ImportError as error:
        raise UserError(
            "subwords of kind 'bpe' need the package subword-nmt (pip install subword-nmt)"
        ) from error
    return cast(ModuleType, getattr(subword_nmt, module))


def _look_up(
    subwords: BytePairs | Words, vocabulary: Vocabulary, lines: Sequence[str]
) -> list[list[int]]:
    return [[vocabulary.id_of(symbol) for symbol in subwords.split(line)] for line in lines]


def _model_files(folder: Path, language: str) -> dict[Kind, Path]:
    return {
        "sentencepiece": folder / f"sentencepiece.{language}.model",
        "bpe": folder / f"bpe.{language}.codes",
    }
