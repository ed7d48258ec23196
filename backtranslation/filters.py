"""Which synthetic pairs are kept: cheap rules on the words of both sides.

A pair is dropped for the first of these reasons that holds:

========== ==================================================================
empty      a side has no text
identical  both sides are the same
short      a side has fewer than ``min_words`` words
long       a side has more than ``max_words`` words
ratio      one side has ``max_ratio`` times as many words as the other
copied     the share ``max_copied`` of the source's words stands in the target
repeated   an n-gram follows itself more than ``max_repeats`` times
script     half of a side's letters are not of the scripts of its language
duplicate  the pair was there before
round trip a forward model finds the target too improbable
========== ==================================================================
"""

import hashlib
import math
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import Field

from backtranslation.config import FilterConfig
from bertfused.config import Section, load_section, save_section
from bertfused.errors import UserError
from bertfused.subwords import Tokenizer
from bertfused.text import (
    SentencePair,
    make_folder,
    open_output,
    read_lines,
    read_pairs,
    sha256_file,
)
from bertfused.vocab import Vocabulary

if TYPE_CHECKING:
    from pandas import DataFrame

Reason = Literal[
    "empty",
    "identical",
    "short",
    "long",
    "ratio",
    "copied",
    "repeated",
    "script",
    "duplicate",
    "round trip",
]
REASONS: tuple[Reason, ...] = get_args(Reason)

REPORT = "report.json"
_CHUNK = 4096  # pairs looked at together


def copied_share(source: str, target: str) -> float:
    """Return the share of the source's words that stand in the target too, each counted once.

    >>> copied_share("der Hund heißt Rex", "the dog is called Rex")
    0.25
    """
    words = Counter(source.lower().split())
    common = words & Counter(target.lower().split())
    return common.total() / max(words.total(), 1)


def longest_run(text: str, most: int = 4) -> int:
    """Return how often in a row some n-gram of up to ``most`` words occurs.

    >>> longest_run("a b a b a b c")
    3
    """
    words = text.split()
    longest = 1 if words else 0
    for n in range(1, most + 1):
        same = 0
        for i in range(n, len(words)):
            same = same + 1 if words[i] == words[i - n] else 0
            longest = max(longest, same // n + 1)
    return longest


def is_of_script(text: str, scripts: tuple[str, ...]) -> bool:
    """Say whether most letters are of some scripts; a text without letters is of any.

    >>> is_of_script("naïve", ("LATIN",)), is_of_script("наивный x", ("LATIN",))
    (True, False)
    """
    letters = [character for character in text if character.isalpha()]
    if not scripts or not letters:
        return True
    right = sum(unicodedata.name(letter, "").startswith(scripts) for letter in letters)
    return 2 * right >= len(letters)


def reason_to_drop(pair: SentencePair, config: FilterConfig) -> Reason | None:
    """Return the first reason that holds for a pair by itself, ``None`` if none does."""
    source, target = pair.source.split(), pair.target.split()
    shorter, longer = sorted((len(source), len(target)))
    if not shorter:
        return "empty"
    if source == target:
        return "identical"
    if shorter < config.min_words:
        return "short"
    if longer > config.max_words:
        return "long"
    if longer > config.max_ratio * shorter:
        return "ratio"
    if copied_share(pair.source, pair.target) > config.max_copied:
        return "copied"
    if max(map(longest_run, pair)) > config.max_repeats:
        return "repeated"
    scripts = (config.source_scripts, config.target_scripts)
    if not all(map(is_of_script, pair, scripts)):
        return "script"
    return None


class Seen:
    """Remembers pairs by a hash of each, which takes about 130 bytes of memory."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, pair: SentencePair) -> bool:
        """Remember a pair; says whether it was there before."""
        digest = hashlib.blake2b("\n".join(pair).encode(), digest_size=16).digest()
        before = len(self._digests)
        self._digests.add(digest)
        return len(self._digests) == before


# The length ratios that the report counts: longer side / shorter side, in words.
_RATIOS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, math.inf)

# Gives the log-probability a token of each pair's target; in order.
ScorePairs = Callable[[Iterable[SentencePair]], Iterator[float]]


class FilterReport(Section):
    """What became of the pairs."""

    config: FilterConfig
    made_from: dict[str, str] = Field(description="Hashes of both texts, and of the forward model.")
    languages: tuple[str, str] = Field(description="Synthetic source, real target.")
    pairs: int = Field(description="Pairs read.")
    kept: int = Field(description="Pairs written.")
    dropped: dict[Reason, int] = Field(description="By the first reason.")
    ratios: dict[str, int] = Field(description="Pairs with text by length ratio, up to the key.")
    copied: float = Field(description="Mean share of copied words in pairs with text.")
    duplicates: int = Field(description="Pairs with text that were there before.")
    unknown: dict[str, float] = Field(
        {}, description="Share of the kept tokens that a dictionary does not have, by language."
    )

    def __str__(self) -> str:
        """Return the report as lines of text."""
        lines = [
            self.table().to_string(formatters={"pairs": "{:,}".format, "share": "{:.2%}".format}),
            f"words copied: {self.copied:.2%}; duplicates: {self.duplicates:,}",
        ]
        lines += [f"{language}: {share:.2%} unknown" for language, share in self.unknown.items()]
        return "\n".join(lines)

    def table(self) -> "DataFrame":
        """Return pairs and shares, kept and by reason."""
        from pandas import DataFrame

        pairs = [self.kept, *self.dropped.values()]
        table = DataFrame({"pairs": pairs}, index=["kept", *self.dropped])
        table["share"] = table["pairs"] / max(self.pairs, 1)
        return table


def filter_pairs(
    source: Path,
    target: Path,
    out: Path,
    config: FilterConfig,
    languages: tuple[str, str],
    *,
    score: ScorePairs | None = None,
    made_from: Mapping[str, str] | None = None,
    tokenizers: Mapping[str, Tokenizer] | None = None,
    progress: Callable[[int], object] = lambda pairs: None,
) -> FilterReport:
    """Write the pairs that are kept as ``filtered.<language>``, and ``report.json``.

    Args:
        source: Synthetic text.
        target: The text that it was made from.
        languages: Of both.
        score: Of a forward model; needed for ``min_round_trip``.
        made_from: What ``made_from_files`` gave, if it is known.
        tokenizers: Of both languages, for the shares of unknown tokens.
        progress: Called with the pairs read since the last call.

    Raises:
        UserError: If the files differ in length.
    """
    make_folder(out)
    (out / REPORT).unlink(missing_ok=True)  # written last, so that with it both files are whole
    counts: Counter[Reason] = Counter()
    sums = _Sums()
    files = [out / f"filtered.{language}" for language in languages]
    with open_output(files[0]) as sources, open_output(files[1]) as targets:
        for pair, reason in _judged(read_pairs(source, target), config, sums, score, progress):
            if reason is not None:
                counts[reason] += 1
                continue
            sums.kept += 1
            sources.write_line(pair.source)
            targets.write_line(pair.target)
    report = FilterReport(
        config=config,
        made_from=dict(made_from or made_from_files(source, target, None)),
        languages=languages,
        pairs=sums.kept + counts.total(),
        kept=sums.kept,
        dropped={reason: counts[reason] for reason in REASONS if counts[reason]},
        ratios=dict(zip(map(str, _RATIOS), sums.ratios, strict=True)),
        copied=sums.copied / max(sums.with_text, 1),
        duplicates=sums.duplicates,
        unknown={
            language: _unknown_share(file, tokenizers[language])
            for file, language in zip(files, languages, strict=True)
            if tokenizers
        },
    )
    save_section(out / REPORT, report)
    return report


def made_from_files(source: Path, target: Path, forward: Path | None) -> dict[str, str]:
    """Hash what decides which pairs are kept, besides the bounds."""
    files = {"source": source, "target": target, "forward": forward}
    return {name: sha256_file(path) for name, path in files.items() if path is not None}


def finished_report(
    out: Path, config: FilterConfig, made_from: Mapping[str, str]
) -> FilterReport | None:
    """Return what the filter left in its folder; ``None`` if it has not finished there.

    Raises:
        UserError: If it had other bounds or other text.
    """
    if not (out / REPORT).exists():
        return None
    report = read_report(out)
    if report.made_from != made_from:
        raise UserError(f"{out} was filtered from other text or by another model; take it away")
    for key, value in config:
        if getattr(report.config, key) != value:
            raise UserError(
                f"{out} was filtered with {key} = {getattr(report.config, key)!r}, not {value!r}; "
                "give another folder, or take this one away"
            )
    return report


def read_report(folder: Path) -> FilterReport:
    """Read what the filter left in its folder.

    Raises:
        UserError: If it has not finished there.
    """
    path = folder / REPORT
    if not path.exists():
        raise UserError(f"{folder} is no folder that the filter finished: it has no {REPORT}")
    return load_section(path, FilterReport)


class _Sums:
    """What is added up over the pairs."""

    def __init__(self) -> None:
        self.kept = self.with_text = self.duplicates = 0
        self.copied = 0.0
        self.ratios = [0] * len(_RATIOS)

    def add(self, pair: SentencePair, is_duplicate: bool) -> None:
        shorter, longer = sorted(len(side.split()) for side in pair)
        if shorter:
            self.with_text += 1
            self.duplicates += is_duplicate
            self.copied += copied_share(*pair)
            self.ratios[bisect_left(_RATIOS, longer / shorter)] += 1


def _judged(
    pairs: Iterator[SentencePair],
    config: FilterConfig,
    sums: _Sums,
    score: ScorePairs | None,
    progress: Callable[[int], object],
) -> Iterator[tuple[SentencePair, Reason | None]]:
    """Say of each pair why it is dropped, or that it is not."""
    seen = Seen()
    while chunk := list(islice(pairs, _CHUNK)):
        reasons: list[Reason | None] = []
        for pair in chunk:
            is_duplicate = seen.add(pair)
            sums.add(pair, is_duplicate)
            reason = reason_to_drop(pair, config)
            if reason is None and is_duplicate and not config.keep_duplicates:
                reason = "duplicate"
            reasons.append(reason)
        if config.min_round_trip is not None:
            assert score is not None
            left = [i for i, reason in enumerate(reasons) if reason is None]
            for i, log_prob in zip(left, score(chunk[i] for i in left), strict=True):
                reasons[i] = None if log_prob >= config.min_round_trip else "round trip"
        yield from zip(chunk, reasons, strict=True)
        progress(len(chunk))


def _unknown_share(path: Path, tokenizer: Tokenizer) -> float:
    tokens = unknown = 0
    lines = read_lines(path)
    while chunk := list(islice(lines, _CHUNK)):
        for ids in tokenizer.encode_batch(chunk):
            tokens += len(ids)
            unknown += ids.count(Vocabulary.unk)
    return unknown / max(tokens, 1)
