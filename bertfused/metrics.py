"""Score translations with sacreBLEU, and say what looks wrong with the text that is scored.

The only module that knows sacreBLEU. Every number carries the signature that makes it comparable
and is the number that the ``sacrebleu`` command prints for the same files, because the same code
computes it. What is added here: lengths are checked before anything is computed (the library stops
at the end of the shorter side and scores the rest), suspicious text is reported, documents can be
scored as single lines, and comparisons become tables.

Text is scored as the reader gives it: detokenised, one string a sentence, without line ends.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, cast

import pandas as pd
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, Result

from bertfused.errors import UserError

Tokenize = Literal["13a", "zh", "ja-mecab", "none"]

DEFAULT_SEED = 12345  # sacreBLEU's own, so that our numbers are the command's numbers

SUBWORD_MARKS = re.compile("@@(?: |$)|\u2581")
SPACED_PUNCTUATION = re.compile(r" [,.](?: |$)")
BYTE_ORDER_MARK = "\ufeff"

# Detokenised text has a stray " ," here and there; tokenised text has one in most lines.
TOKENISED_SHARE = 0.1


@dataclass(frozen=True)
class Interval:
    """Hold the mean of the bootstrap resamples and half the width of their 95% interval."""

    mean: float
    half_width: float


@dataclass(frozen=True)
class BleuParts:
    """Hold what BLEU is made of: lengths in tokens of the metric, n-gram precisions in percent."""

    brevity_penalty: float
    hypothesis_length: int
    reference_length: int
    precisions: tuple[float, ...]


@dataclass(frozen=True)
class Score:
    """Hold one number in [0, 100] with the signature under which it may be compared.

    ``str(score)`` is the line that ``sacrebleu -f text -w 2`` prints for it.
    """

    name: str
    value: float
    signature: str
    interval: Interval | None = None
    parts: BleuParts | None = None

    def __str__(self) -> str:
        line = f"{self.name}|{self.signature} = {self.value:.2f}"
        if self.interval is not None:
            line += f" (μ = {self.interval.mean:.2f} ± {self.interval.half_width:.2f})"
        if self.parts is not None:
            parts = self.parts
            precisions = "/".join(f"{precision:.1f}" for precision in parts.precisions)
            ratio = parts.hypothesis_length / (parts.reference_length or 1)
            line += (
                f" {precisions} (BP = {parts.brevity_penalty:.3f} ratio = {ratio:.3f}"
                f" hyp_len = {parts.hypothesis_length} ref_len = {parts.reference_length})"
            )
        return line


@dataclass(frozen=True)
class Comparison:
    """Hold one metric of one system, tested against the first system (the baseline).

    ``p_value`` is None for the baseline itself; ``delta`` is this system's score less the
    baseline's.
    """

    system: str
    score: Score
    delta: float
    p_value: float | None


def bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: Tokenize = "13a",
    resamples: int | None = None,
    seed: int = DEFAULT_SEED,
) -> Score:
    """Compute corpus BLEU (Papineni et al., 2002), with its parts.

    Args:
        hypotheses: One line a sentence.
        references: As many lines.
        lowercase: Ignore case.
        tokenize: The metric's own tokenizer, applied to both sides. ``none`` is for text that
            is tokenised already; its scores compare with no published ones.
        resamples: Bootstrap resamples behind the 95% interval; None computes no interval.
        seed: Of the resampling.

    Raises:
        UserError: If the sides differ in length or are empty, ``resamples`` is under 2, or the
            tokenizer is not installed.
    """
    metric = _bleu_metric(lowercase, tokenize)
    return _corpus_score(metric, hypotheses, references, resamples, seed)


def chrf(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    resamples: int | None = None,
    seed: int = DEFAULT_SEED,
) -> Score:
    """Compute corpus chrF (Popović, 2015; character 6-grams, beta 2).

    The arguments are those of :func:`bleu`.

    Raises:
        UserError: If the sides differ in length or are empty, or ``resamples`` is under 2.
    """
    return _corpus_score(_Chrf(lowercase=lowercase), hypotheses, references, resamples, seed)


def document_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    docids: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: Tokenize = "13a",
    resamples: int | None = None,
    seed: int = DEFAULT_SEED,
) -> Score:
    """Compute d-BLEU: BLEU where every document is one line (Liu et al., 2020, mBART).

    N-grams may cross sentence boundaries, and the interval resamples documents.

    Args:
        hypotheses: One line a sentence.
        references: As many lines.
        docids: As many document ids, see :func:`join_documents`.
        lowercase: See :func:`bleu`.
        tokenize: See :func:`bleu`.
        resamples: See :func:`bleu`.
        seed: See :func:`bleu`.

    Raises:
        UserError: As :func:`bleu`, or if there are more or fewer ids than lines.
    """
    _check_lengths("hypotheses", hypotheses, "references", references)
    score = bleu(
        join_documents(hypotheses, docids),
        join_documents(references, docids),
        lowercase=lowercase,
        tokenize=tokenize,
        resamples=resamples,
        seed=seed,
    )
    return replace(score, name="d-BLEU")


def join_documents(lines: Sequence[str], docids: Sequence[str]) -> list[str]:
    """Join the lines of each document by a space.

    A document is a run of equal ids. A blank id stands at a line that only separates or pads,
    and belongs to the document before it (at the very start, to the first one). Blank lines add
    nothing to the text.

    Raises:
        UserError: If there are more or fewer ids than lines.

    Example:
        >>> join_documents(["A b.", "C.", "", "D."], ["1", "1", "", "2"])
        ['A b. C.', 'D.']
    """
    _check_lengths("document ids", docids, "text", lines)
    owner = next((docid for docid in docids if docid.strip()), "")
    owners = []
    for docid in docids:
        owner = docid if docid.strip() else owner
        owners.append(owner)
    pairs = zip(owners, lines, strict=True)
    return [
        " ".join(line for _, line in document if line.strip())
        for _, document in groupby(pairs, key=itemgetter(0))
    ]


def check_texts(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    hypothesis_name: str = "hypotheses",
    reference_name: str = "references",
    tokenize: Tokenize = "13a",
) -> list[str]:
    """Find what would make a score wrong or not comparable.

    Args:
        hypotheses: One line a sentence.
        references: As many lines.
        hypothesis_name: What the messages call the first, say its file.
        reference_name: What the messages call the second.
        tokenize: With ``none``, text that looks tokenised is as it should be.

    Returns:
        One sentence for each kind of trouble in each text, naming the first line that shows it:
        subword marks, byte order marks, references that are empty where the hypothesis is not,
        text that looks tokenised.

    Raises:
        UserError: If the two differ in length or are empty.
    """
    _check_lengths(hypothesis_name, hypotheses, reference_name, references)
    warnings = []
    for name, lines in ((hypothesis_name, hypotheses), (reference_name, references)):
        marked = _matching(lines, lambda line: SUBWORD_MARKS.search(line) is not None)
        if marked:
            what = "a subword mark ('@@ ' or U+2581) is left, so the text was not joined to words"
            warnings.append(_warning(name, marked, what))
        with_bom = _matching(lines, lambda line: line.startswith(BYTE_ORDER_MARK))
        if with_bom:
            what = "a byte order mark (U+FEFF) begins the line and counts as text"
            warnings.append(_warning(name, with_bom, what))
        spaced = _matching(lines, lambda line: SPACED_PUNCTUATION.search(line) is not None)
        num_filled = sum(1 for line in lines if line.strip())
        if tokenize != "none" and spaced and len(spaced) >= TOKENISED_SHARE * num_filled:
            what = "the text looks tokenised (' ,' or ' .'), but BLEU itself does that"
            warnings.append(_warning(name, spaced, what))
    pairs = zip(hypotheses, references, strict=True)
    empty = [n for n, (hyp, ref) in enumerate(pairs, 1) if hyp.strip() and not ref.strip()]
    if empty:
        warnings.append(_warning(reference_name, empty, "the reference is empty"))
    return warnings


def paired_bootstrap(
    references: Sequence[str],
    systems: Mapping[str, Sequence[str]],
    *,
    lowercase: bool = False,
    tokenize: Tokenize = "13a",
    resamples: int = 1000,
    seed: int = DEFAULT_SEED,
) -> list[Comparison]:
    """Test each system against the first one by paired bootstrap resampling (Koehn, 2004).

    Scores, intervals and p-values are those of ``sacrebleu --paired-bs -m bleu chrf``.

    Args:
        references: One line a sentence.
        systems: Name and lines of at least two systems, the baseline first.
        lowercase: Ignore case in both metrics.
        tokenize: BLEU's tokenizer.
        resamples: Bootstrap resamples, at least 2.
        seed: Of the resampling.

    Returns:
        BLEU and chrF of each system, in the order of ``systems``.

    Raises:
        UserError: If a system and the references differ in length, there are fewer than two
            systems or resamples, or the tokenizer is not installed.
    """
    return _paired_test("bs", references, systems, lowercase, tokenize, resamples, seed)


def paired_approximate_randomization(
    references: Sequence[str],
    systems: Mapping[str, Sequence[str]],
    *,
    lowercase: bool = False,
    tokenize: Tokenize = "13a",
    trials: int = 10000,
    seed: int = DEFAULT_SEED,
) -> list[Comparison]:
    """Test each system against the first one by approximate randomization.

    The test is Riezler and Maxwell's (2005). Scores and p-values are those of
    ``sacrebleu --paired-ar -m bleu chrf``; there are no intervals. The arguments are those of
    :func:`paired_bootstrap`, with the number of random swaps as ``trials``.

    Raises:
        UserError: As :func:`paired_bootstrap`.
    """
    return _paired_test("ar", references, systems, lowercase, tokenize, trials, seed)


def comparison_table(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """Lay comparisons out for analysis, one row for each system and metric.

    ``mean``, ``half_width`` and ``p_value`` are NaN where they do not exist.
    """
    rows = []
    for comparison in comparisons:
        score, interval = comparison.score, comparison.score.interval
        rows.append(
            {
                "system": comparison.system,
                "metric": score.name,
                "score": score.value,
                "mean": interval.mean if interval else None,
                "half_width": interval.half_width if interval else None,
                "delta": comparison.delta,
                "p_value": comparison.p_value,
                "signature": score.signature,
            }
        )
    numbers = ["score", "mean", "half_width", "delta", "p_value"]
    return pd.DataFrame(rows).astype(dict.fromkeys(numbers, "float64"))


def format_comparison(comparisons: Sequence[Comparison]) -> str:
    """Write comparisons for reading: one line a system, one column a metric, then the signatures.

    A cell reads "score (mean ± half width of the 95% interval) p = p-value"; an asterisk marks a
    difference with a p-value under 0.05. (sacreBLEU gives a system and its copy the smallest
    p-value there is, and marks that too; here no difference is not marked.)
    """
    cells: dict[str, dict[str, str]] = {}
    signatures: dict[str, str] = {}
    for comparison in comparisons:
        score = comparison.score
        cell = f"{score.value:.2f}"
        if score.interval is not None:
            cell += f" ({score.interval.mean:.2f} ± {score.interval.half_width:.2f})"
        if comparison.p_value is not None:
            is_significant = comparison.p_value < 0.05 and comparison.delta != 0
            cell += f" p = {comparison.p_value:.4f}" + ("*" if is_significant else "")
        cells.setdefault(comparison.system, {})[score.name] = cell
        signatures[score.name] = score.signature
    table = pd.DataFrame.from_dict(cells, orient="index").to_string(justify="left")
    notes = [f"{name}: {signature}" for name, signature in signatures.items()]
    return "\n".join([table, "", *notes])


class _Chrf(CHRF):
    """The library's chrF, whose resamples are all of one type.

    It gives 0.0 where nothing matches and a number of numpy elsewhere, of which it then takes a
    mean that refuses a mixture.
    """

    def _compute_f_score(self, statistics: Any) -> Any:
        score = super()._compute_f_score(statistics)
        kind = getattr(statistics, "dtype", None)
        return kind.type(score) if kind is not None and kind.kind == "f" else score


def _bleu_metric(lowercase: bool, tokenize: Tokenize) -> BLEU:
    # force: the library's own look at tokenised text logs a warning; check_texts is ours.
    try:
        return BLEU(lowercase=lowercase, tokenize=tokenize, force=True)
    except RuntimeError as error:
        raise UserError(
            f"BLEU's tokenizer {tokenize!r} is not installed; pip install 'sacrebleu[ja]'"
        ) from error


def _corpus_score(
    metric: BLEU | CHRF,
    hypotheses: Sequence[str],
    references: Sequence[str],
    resamples: int | None,
    seed: int,
) -> Score:
    _check_lengths("hypotheses", hypotheses, "references", references)
    if resamples is not None:
        _check_resamples(resamples)
    with _sacrebleu_seed(seed):
        result: Any = metric.corpus_score(hypotheses, [references], n_bootstrap=resamples or 1)
    interval = None
    if resamples is not None:
        # The library has no public name for them, and prints them rounded.
        interval = Interval(float(result._mean), float(result._ci))
    parts = None
    if isinstance(metric, BLEU):
        parts = BleuParts(result.bp, result.sys_len, result.ref_len, tuple(result.precisions))
    signature = metric.get_signature().format()
    return Score(result.name, float(result.score), signature, interval, parts)


def _paired_test(
    method: Literal["bs", "ar"],
    references: Sequence[str],
    systems: Mapping[str, Sequence[str]],
    lowercase: bool,
    tokenize: Tokenize,
    samples: int,
    seed: int,
) -> list[Comparison]:
    if len(systems) < 2:
        raise UserError(f"a comparison needs at least two systems, but there is {len(systems)}")
    _check_resamples(samples)
    for name, hypotheses in systems.items():
        _check_lengths(name, hypotheses, "references", references)
    metrics = {
        "BLEU": _bleu_metric(lowercase, tokenize),
        "CHRF": _Chrf(lowercase=lowercase),
    }
    with _sacrebleu_seed(seed):
        signatures, results = PairedTest(
            list(systems.items()), metrics, [references], test_type=method, n_samples=samples
        )()
    comparisons = []
    for index, system in enumerate(systems):
        for metric, signature in signatures.items():
            # One list holds names, the others results, and the library's annotation says either.
            row = cast("Sequence[Result]", results[metric])
            result, baseline = row[index], row[0]
            interval = None
            if result.mean is not None and result.ci is not None:
                interval = Interval(float(result.mean), float(result.ci))
            score = Score(metric, float(result.score), signature.format(), interval)
            delta = score.value - float(baseline.score)
            comparisons.append(Comparison(system, score, delta, result.p_value))
    return comparisons


@contextmanager
def _sacrebleu_seed(seed: int) -> Iterator[None]:
    """Hand the library its seed, which it takes from the environment and nowhere else."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before


def _check_lengths(
    name: str, lines: Sequence[str], other_name: str, other_lines: Sequence[str]
) -> None:
    if len(lines) != len(other_lines):
        raise UserError(
            f"{name} has {len(lines):,} lines but {other_name} has {len(other_lines):,}"
        )
    if not lines:
        raise UserError(f"there is nothing to score: {name} and {other_name} have no lines")


def _check_resamples(samples: int) -> None:
    if samples < 2:
        raise UserError(f"resampling needs at least 2 samples, but {samples} was asked for")


def _matching(lines: Sequence[str], test: Callable[[str], bool]) -> list[int]:
    """Return the numbers, from 1, of the lines that pass the test."""
    return [number for number, line in enumerate(lines, 1) if test(line)]


def _warning(name: str, numbers: Sequence[int], what: str) -> str:
    count = f" ({len(numbers):,} such lines)" if len(numbers) > 1 else ""
    return f"{name}, line {numbers[0]}: {what}{count}"
