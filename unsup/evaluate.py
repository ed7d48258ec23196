"""Evaluate a model in both directions on the pairs of a DATA folder."""

from pathlib import Path

import pandas as pd
from pydantic import Field

from bertfused.config import SearchConfig, Section
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.metrics import Tokenize, bleu, chrf
from bertfused.progress import warn_of
from bertfused.text import make_folder, open_output, read_lines
from bertfused.translate import Translator, choose_device
from unsup.validation import copy_rate, same_rate


class DirectionReport(Section):
    """What was found of one test set in one direction."""

    test: str = Field(description="Name of the set.")
    direction: str = Field(description="Languages, e.g. 'en-fr'.")
    bleu: float = Field(description="BLEU.")
    bleu_half_width: float = Field(description="Half of its 95% interval.")
    chrf: float = Field(description="chrF.")
    length_ratio: float = Field(description="Words of the translations to those of the references.")
    copied: float = Field(description="Share of the source's words that stand in translations.")
    copied_by_reference: float = Field(description="The same of the references.")
    same: float = Field(description="Share of the sources that are their own translation.")


class EvaluationReport(Section):
    """All directions and sets, with the signatures of the scores."""

    directions: tuple[DirectionReport, ...]
    signatures: tuple[str, ...]

    def __str__(self) -> str:
        table = pd.DataFrame([direction.model_dump() for direction in self.directions])
        return "\n".join([table.round(3).to_string(index=False), "", *self.signatures])


def evaluate(
    run: Path,
    data: Path,
    *,
    search: SearchConfig,
    output: Path | None = None,
    tokenize: Tokenize = "13a",
    lowercase: bool = False,
    device: str = "auto",
    encoder: str | None = None,
    resamples: int = 1000,
) -> EvaluationReport:
    """Translate dev and test sets both ways.

    Args:
        output: Folder for the translations.

    Raises:
        UserError: If the model is not of the folder's languages, or there is no set.
    """
    folder = DataFolder.open(data)
    first, second = folder.languages
    found: list[DirectionReport] = []
    signatures: dict[str, None] = {}
    if not folder.splits:
        raise UserError(f"{data} was prepared without dev and test sets")
    (member,) = Translator.load(run, device=device, encoder=encoder).members
    # Both before the first line is translated, so that a model of one direction is refused at once.
    members = [member.towards(target) for target in (second, first)]
    for (source, target), own in zip(((first, second), (second, first)), members, strict=True):
        translator = Translator([own], choose_device(device))
        for name in folder.splits:
            split = folder.split(name)
            texts = {first: split.source_text, second: split.target_text}
            sources, references = (list(read_lines(texts[side])) for side in (source, target))
            hypotheses = [line.text for line in translator.translate(sources, search)]
            if output is not None:
                _write(output, f"{name}.{source}-{target}", hypotheses)
            score = bleu(
                hypotheses,
                references,
                lowercase=lowercase,
                tokenize=tokenize,
                resamples=resamples,
            )
            characters = chrf(hypotheses, references, lowercase=lowercase)
            signatures |= {score.signature: None, characters.signature: None}
            assert score.interval is not None
            words = [sum(len(line.split()) for line in side) for side in (hypotheses, references)]
            found.append(
                DirectionReport(
                    test=name,
                    direction=f"{source}-{target}",
                    bleu=score.value,
                    bleu_half_width=score.interval.half_width,
                    chrf=characters.value,
                    length_ratio=words[0] / max(words[1], 1),
                    copied=copy_rate(sources, hypotheses),
                    copied_by_reference=copy_rate(sources, references),
                    same=same_rate(sources, hypotheses),
                )
            )
        warn_of(translator.counts)
    return EvaluationReport(directions=tuple(found), signatures=tuple(signatures))


def _write(folder: Path, name: str, lines: list[str]) -> None:
    make_folder(folder)
    with open_output(folder / name) as sink:
        for line in lines:
            sink.write_line(line)
