"""The demonstration: a sentence-level model can only guess; a document-level one knows.

It generates a corpus (docs/demo_corpus.md), trains a sentence-level NMT on it, fuses the packaged
MiniLM into that as a document-level model, and tests both on combinations that training never
had. Every source sentence of the contrastive test stands equally often with each answer.
"""

import logging
import sys
from functools import partial
from pathlib import Path

from bertfused import metrics
from bertfused.checkpoint import open_encoder
from bertfused.commands import Mode, train_model
from bertfused.config import load_recipe
from bertfused.console import progress
from bertfused.data import DataFolder
from bertfused.features import cache_features
from bertfused.prepare import prepare
from bertfused.text import open_output, read_lines
from bertfused.translate import Translator
from docnmt.config import DocumentRecipe
from docnmt.contrast import Accuracy, ContrastResult, contrast
from docnmt.contrastive import ContrastiveItem, read_contrastive
from docnmt.grammar import SIZES, chance_level, write_corpus
from docnmt.translate import as_read, score

_logger = logging.getLogger(__name__)

RECIPE = Path(__file__).parent / "recipes" / "demo.toml"
NEEDED = 0.95


def run_demo(mode: Mode, out: Path, *, quiet: bool = False) -> None:
    """Make corpus, data and both models, test them, and print the table.

    Raises:
        SystemExit: With status 1, if the sentence-level model is not at chance or the
            document-level one does not solve the contrastive test.
    """
    text = out / "text"
    text.mkdir(parents=True, exist_ok=True)
    _logger.info("1/5 generating the corpus in %s", text)
    write_corpus(text, seed=1, sizes=SIZES)
    recipe = load_recipe(RECIPE, DocumentRecipe, folder=text)
    report = prepare(
        recipe, out / "data", reader=mode.corpora(recipe), documents=mode.documents(recipe)
    )
    _logger.info("2/5 prepared %s training sentences", f"{report.splits['train'].kept:,}")
    cache(recipe, out / "data", quiet)
    plain = load_recipe(RECIPE, DocumentRecipe, ["fusion=none", "optim.lr=3e-3"], folder=text)
    for step, (name, run_recipe, init) in enumerate(
        (("plain", plain, None), ("fused", recipe, out / "plain")), start=3
    ):
        what = "sentence-level model" if init is None else "document-level model from it"
        _logger.info("%d/5 training the %s", step, what)
        folder = out / name
        resume = (folder / "config.toml").exists()
        train_model(mode, run_recipe, out / "data", folder, init=init, resume=resume, quiet=quiet)
    _logger.info("5/5 testing both")
    items = read_contrastive(text / "contrastive.jsonl")
    results = [(name, *_test(mode, out, name, items)) for name in ("plain", "fused")]
    chance = chance_level(items)
    print(_table(results, chance, len(items)))
    sys.exit(_verdict(results[0][2].overall, results[1][2].overall, chance))


def cache(recipe: DocumentRecipe, data: Path, quiet: bool) -> None:
    """Compute the encoder's states once for all epochs."""
    assert recipe.fusion is not None
    encoder = open_encoder(recipe.fusion, languages=[recipe.data.source])
    bar = partial(progress, quiet=quiet)
    cache_features(DataFolder.open(data), encoder, "fp16", bar)


def _test(
    mode: Mode, out: Path, name: str, items: list[ContrastiveItem]
) -> tuple[metrics.Score, ContrastResult]:
    translator = Translator.load(out / name)
    documents = translator.members[0].card.documents
    source, reference = out / "text" / "test.en", out / "text" / "test.de"
    lines = [line for line in mode.source_lines(source, documents) if not isinstance(line, str)]
    hypotheses = [translation.text for translation in translator.translate(lines)]
    with open_output(out / f"{name}.de") as writer:
        for hypothesis in hypotheses:
            writer.write_line(hypothesis)
    references = [line for line in read_lines(reference) if line]
    result = contrast(items, partial(score, translator), as_read=partial(as_read, translator))
    return metrics.bleu(hypotheses, references), result


def _table(
    results: list[tuple[str, metrics.Score, ContrastResult]], chance: float, items: int
) -> str:
    columns = ["BLEU", "contrastive", *results[0][2].by_category]
    lines = ["", " " * 22 + "".join(f"{column:>14}" for column in columns)]
    for name, bleu, result in results:
        label = "sentence-level" if name == "plain" else "document-level, fused"
        accuracies = (result.overall, *result.by_category.values())
        shares = "".join(f"{accuracy.share:>14.1%}" for accuracy in accuracies)
        lines.append(f"{label:22}{bleu.value:>14.1f}{shares}")
    lines += [
        f"{'chance':22}{'':>14}{chance:>14.1%}",
        "",
        f"{items} contrastive items; BLEU: {results[0][1].signature}",
    ]
    return "\n".join(lines)


def _verdict(plain: Accuracy, fused: Accuracy, chance: float) -> int:
    """Say whether the demonstration showed what it is for; return the exit status."""
    is_chance = abs(plain.share - chance) < 1e-9
    is_solved = fused.share >= NEEDED
    if not is_chance:
        print(f"unexpected: the sentence-level model is not at chance ({chance:.1%})")
    if not is_solved:
        print(f"unexpected: the document-level model is under {NEEDED:.0%}")
    return 0 if is_chance and is_solved else 1
