"""Translate documents: every sentence with the previous ones in the pretrained encoder's input."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, tee
from pathlib import Path
from typing import Any

from bertfused.config import SearchConfig
from bertfused.translate import Long, SourceLine, Translation, Translator
from docnmt.documents import DocumentLine, InputLine, SeparatorLine, contexts, padded


class DocumentTranslator:
    """Translates documents with one model, or with the average of several.

    Example::

        translator = DocumentTranslator.load("runs/demo/fused")
        for document in translator.translate([["The lamp is new.", "It is here."]]):
            print([translation.text for translation in document])

    Attributes:
        translator: What translates the sentences, each with its context.
    """

    def __init__(self, translator: Translator) -> None:
        self.translator = translator

    @staticmethod
    def load(
        run: str | Path,
        *,
        ensemble: Sequence[str | Path] = (),
        device: str = "auto",
        encoder: str | None = None,
        encoder_precision: str = "fp32",
    ) -> "DocumentTranslator":
        """Load a RUN, or several, as ``Translator.load`` does.

        A model trained on sentences is taken too: it sees no context.
        """
        return DocumentTranslator(
            Translator.load(
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
    for line, window in zip(lines, contexts(again, previous), strict=True):
        if isinstance(line, SeparatorLine):
            yield line.text
        else:
            yield SourceLine(line.source, padded(window, previous), document=line.document)
