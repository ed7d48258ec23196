"""Translate and score documents with any RUN: in context where it reads some, else line by line."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, tee
from pathlib import Path
from typing import Any

from bertfused.checkpoint import TrainedModel, load_card, model_folder
from bertfused.config import InferencePrecision, SearchConfig
from bertfused.errors import UserError
from bertfused.packed import pack_linears
from bertfused.scoring import PairScore, score_pairs
from bertfused.subwords import load_tokenizer
from bertfused.translate import (
    Long,
    Member,
    SourceLine,
    Translation,
    Translator,
    choose_device,
)
from docnmt.concatenation import ConcatenatedSystem
from docnmt.config import ConcatenationConfig
from docnmt.context import ContextModel
from docnmt.documents import DocumentLine, InputLine, SeparatorLine, contexts, padded
from docnmt.models import context_of, load_network
from docnmt.on_base import ContextSystem
from docnmt.sequential import DocumentLineTranslator, paired_context

AnyTranslator = Translator | DocumentLineTranslator


def load(
    run: str | Path,
    *,
    ensemble: Sequence[str | Path] = (),
    to: str | None = None,
    device: str = "auto",
    encoder: str | None = None,
    encoder_precision: InferencePrecision = "fp32",
) -> AnyTranslator:
    """Load a RUN of any kind; options as of ``Translator.load``.

    Raises:
        UserError: If a context-aware one is to be part of an ensemble.
    """
    cards = [load_card(model_folder(Path(path))) for path in (run, *ensemble)]
    if all(card.context is None for card in cards):
        return Translator.load(
            run,
            ensemble=ensemble,
            to=to,
            device=device,
            encoder=encoder,
            encoder_precision=encoder_precision,
        )
    if ensemble:
        raise UserError("a context-aware model cannot be part of an ensemble")
    folder, (card,) = model_folder(Path(run)), cards
    network = load_network(folder, card)
    if encoder is not None and card.fusion is None:
        raise UserError(f"{run} is on a plain model: it reads no encoder {encoder!r}")
    base = network.base if isinstance(network, ContextModel) else network
    tokenizers = [load_tokenizer(folder, language) for language in (card.source, card.target)]
    trained = TrainedModel(folder, card, base, *tokenizers)
    member = Member.of(trained, encoder, encoder_precision)
    if to is not None:
        member = member.towards(to)
    place = choose_device(device)
    pack_linears(network, place)
    if isinstance(network, ContextModel):
        return DocumentLineTranslator(ContextSystem(network, member, place))
    config = context_of(card, folder)
    assert isinstance(config, ConcatenationConfig)
    return DocumentLineTranslator(ConcatenatedSystem(member, config, place))


def reads_context(translator: AnyTranslator) -> bool:
    """Say whether anything but the current sentence can change a score."""
    if isinstance(translator, DocumentLineTranslator):
        return True
    return _bert_previous(translator) > 0


def as_read(translator: AnyTranslator, line: SourceLine) -> SourceLine:
    """Leave of a line what can change a score: its text, and the context that the model reads.

    Blank sentences of the context go, and so do the names of the document and what a translation
    has to begin with.
    """
    if isinstance(translator, Translator):
        previous = _bert_previous(translator)
        texts = [text for text in line.context if text.strip()]
        return SourceLine(line.text, tuple(texts[-previous:] if previous else ()))
    system = translator.system
    if not system.reads_target:
        line = replace(line, target_context=())
    # What the encoder reads before the oldest one counts, too.
    pairs = paired_context(line)[-system.sentences - _bert_previous(system.base) :]
    targets = [target for _, target in pairs][-system.sentences :] if system.reads_target else []
    return SourceLine(
        line.text, tuple(source for source, _ in pairs), target_context=tuple(targets)
    )


def score(
    translator: AnyTranslator,
    pairs: Iterable[tuple[SourceLine, str]],
    *,
    batch_tokens: int = 4096,
    label_smoothing: float = 0.0,
) -> Iterator[PairScore]:
    """Score targets, each in the context on both sides that its source line holds."""
    read = ((as_read(translator, line), target) for line, target in pairs)
    if isinstance(translator, DocumentLineTranslator):
        return translator.score(read, batch_tokens=batch_tokens, label_smoothing=label_smoothing)
    previous = _bert_previous(translator)
    return score_pairs(
        translator,
        ((replace(line, context=padded(line.context, previous)), target) for line, target in read),
        batch_tokens=batch_tokens,
        label_smoothing=label_smoothing,
    )


def score_documents(
    translator: AnyTranslator,
    pairs: Iterable[tuple[SourceLine, str]],
    *,
    batch_tokens: int = 4096,
    shuffle_encoder: bool = False,
) -> Iterator[PairScore]:
    """Score the lines of documents in order, each after those before it and their references.

    Args:
        batch_tokens: As of ``scoring.score_pairs``.
        shuffle_encoder: As there; not for a context-aware model.
    """
    if isinstance(translator, Translator):
        return score_pairs(
            translator, pairs, batch_tokens=batch_tokens, shuffle_encoder=shuffle_encoder
        )
    assert not shuffle_encoder
    system = translator.system
    sentences = system.sentences + _bert_previous(system.base)
    return translator.score(in_reference_context(pairs, sentences), batch_tokens=batch_tokens)


def in_reference_context(
    pairs: Iterable[tuple[SourceLine, str]], sentences: int
) -> Iterator[tuple[SourceLine, str]]:
    """Give each line the previous lines of its document and their translations as context.

    A line without source text is no context.

    >>> lines = [(SourceLine(text, document="1"), text.upper()) for text in "ab"]
    >>> [line.target_context for line, _ in in_reference_context(lines, 3)]
    [(), ('A',)]
    """
    before: deque[tuple[str, str]] = deque(maxlen=sentences)
    document: str | None = None
    for line, target in pairs:
        if line.document is None or line.document != document:
            before.clear()
            document = line.document
        sources = tuple(source for source, _ in before)
        targets = tuple(translation for _, translation in before)
        yield replace(line, context=sources, target_context=targets), target
        if line.text.strip():
            before.append((line.text, target))


def _bert_previous(translator: Translator) -> int:
    """Return how many previous sentences the pretrained encoder reads."""
    documents = translator.documents
    is_fused = any(member.encoder is not None for member in translator.members)
    return int(documents["previous"]) if documents and is_fused else 0


class DocumentTranslator:
    """Translates documents with a RUN of any kind, or with the average of several fused ones.

    Example::

        translator = DocumentTranslator.load("runs/demo/fused")
        for document in translator.translate([["The lamp is new.", "It is here."]]):
            print([translation.text for translation in document])

    Attributes:
        translator: What translates the sentences, each with its context.
    """

    def __init__(self, translator: AnyTranslator) -> None:
        self.translator = translator

    @staticmethod
    def load(
        run: str | Path,
        *,
        ensemble: Sequence[str | Path] = (),
        device: str = "auto",
        encoder: str | None = None,
        encoder_precision: InferencePrecision = "fp32",
    ) -> "DocumentTranslator":
        """Load a RUN, or several, as ``load`` does.

        A model trained on sentences is taken too: it sees no context.
        """
        return DocumentTranslator(
            load(
                run,
                ensemble=ensemble,
                device=device,
                encoder=encoder,
                encoder_precision=encoder_precision,
            )
        )

    def translate(
        self,
        documents: Iterable[Sequence[str]],
        search: SearchConfig | None = None,
        *,
        nbest: int = 1,
        batch_tokens: int = 4096,
        long: Long = "split",
    ) -> Iterator[list[Translation]]:
        """Translate documents, in order; each gives one translation per sentence, blank ones too.

        Sentences of several documents are translated together. Options as of
        ``Translator.translate``.
        """
        documents, ahead = tee(documents)
        lines = (
            DocumentLine(str(number), sentence, None)
            for number, document in enumerate(ahead)
            for sentence in _sentences(document)
        )
        translations = self.translator.translate(
            in_context(lines, self.translator.documents),
            search,
            nbest=nbest,
            batch_tokens=batch_tokens,
            long=long,
        )
        return (list(islice(translations, len(document))) for document in documents)


def _sentences(document: Sequence[str]) -> Sequence[str]:
    if isinstance(document, str):  # a sequence of strings too, and easily given by mistake
        raise TypeError(f"a document is a list of sentences, not a string: {document[:40]!r}")
    return document


def in_context(
    lines: Iterable[InputLine], documents: Mapping[str, Any] | None
) -> Iterator[SourceLine | str]:
    """Give each line the previous ones of its document; separators come as they are.

    Args:
        documents: What the model remembers of [documents]; ``None`` for one without context.
    """
    previous = documents["previous"] if documents else 0
    lines, again = tee(lines)
    windows = contexts(again, previous)
    for number, (line, window) in enumerate(zip(lines, windows, strict=True), start=1):
        if isinstance(line, SeparatorLine):
            yield line.text
        else:
            context = padded(window, previous)
            yield SourceLine(line.source, context, document=line.document, number=number)
