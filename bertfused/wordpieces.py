"""What the extra encoder reads: ids of a sentence, with its context, in the encoder's symbols."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from bertfused.errors import UserError
from bertfused.subwords import Tokenizer, load_tokenizer
from bertfused.vocab import MASK, Vocabulary

CARD = "model.json"


@dataclass(frozen=True)
class WordpieceInput:
    """Ids for the encoder, and how many wordpieces of context were cut off."""

    ids: list[int]
    truncated: int


class Wordpieces(ABC):
    """A tokenizer with the special tokens around a sentence and between context and sentence.

    Args:
        prefix: Ids before everything.
        between: Ids between a part of the context and what follows it.
        suffix: Ids after everything.
        max_length: Most ids the encoder takes at once.
        pad: The padding id.
        mask: The id that stands for a hidden token, or ``None`` if the encoder knows none.
        separator: The id that closes each part, or ``None`` if the encoder has no segments.
        special: All special ids.
        vocabulary_size: Ids are below this.
        fingerprint: sha256 of the tokenizer's definition.
    """

    def __init__(
        self,
        prefix: list[int],
        between: list[int],
        suffix: list[int],
        *,
        max_length: int,
        pad: int,
        mask: int | None,
        separator: int | None,
        special: frozenset[int],
        vocabulary_size: int,
        fingerprint: str,
    ) -> None:
        self._prefix, self._between, self._suffix = prefix, between, suffix
        self.max_length = max_length
        self.pad = pad
        self.mask = mask
        self.separator = separator
        self.special = special
        self.vocabulary_size = vocabulary_size
        self.fingerprint = fingerprint

    @abstractmethod
    def split(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts; none of them is special, whatever the texts say."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the tokenizer beside a fine-tuned encoder."""

    def reading(self, language: str) -> "Wordpieces":
        """Return the tokenizer for text of a language: this one, if it has rules for none."""
        return self

    def encode(self, sentence: str, context: Sequence[str] = ()) -> WordpieceInput:
        """Return "[CLS] c1 [SEP] ... cn [SEP] sentence [SEP]" in the encoder's own symbols.

        Where the encoder's limit is passed, the context loses its oldest wordpieces first. The
        sentence loses none: the encoder takes a long one in overlapping windows.
        """
        return self.encode_batch([sentence], [context])[0]

    def encode_batch(
        self, sentences: Sequence[str], contexts: Sequence[Sequence[str]]
    ) -> list[WordpieceInput]:
        """Encode many sentences, each with its context; a text that recurs is split once."""
        texts = list(dict.fromkeys(chain(sentences, *contexts)))
        ids = dict(zip(texts, self.split(texts), strict=True))
        return [
            self._joined(ids[sentence], [ids[part] for part in context])
            for sentence, context in zip(sentences, contexts, strict=True)
        ]

    def encode_ids(
        self, sentences: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> list[list[int]]:
        """Encode sentences given as an NMT's ids, without EOS: their text, split anew.

        What is masked there is masked here, or left out if the encoder has no mask.
        """
        mask = tokenizer.vocabulary.tags.get(MASK)
        runs = [
            [(is_mask, list(run)) for is_mask, run in groupby(ids, lambda id: id == mask)]
            for ids in sentences
        ]
        texts = [tokenizer.decode(run) for ids in runs for is_mask, run in ids if not is_mask]
        of_texts = iter(self.split(texts))
        blank = [] if self.mask is None else [self.mask]
        encoded = []
        for ids in runs:
            parts = [blank * len(run) if is_mask else next(of_texts) for is_mask, run in ids]
            encoded.append([*self._prefix, *chain.from_iterable(parts), *self._suffix])
        return encoded

    def _joined(self, current: list[int], context: Sequence[list[int]]) -> WordpieceInput:
        before: list[int] = []
        for part in context:
            before += part + self._between
        room = self.max_length - len(self._prefix) - len(current) - len(self._suffix)
        truncated = max(0, len(before) - max(room, len(self._between) if context else 0))
        return WordpieceInput(self._prefix + before[truncated:] + current + self._suffix, truncated)


class _OurSubwords(Wordpieces):
    """Wordpieces that are subwords of ours."""

    _tokenizer: Tokenizer

    def split(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts."""
        return self._tokenizer.encode_batch(texts)

    def encode_ids(
        self, sentences: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> list[list[int]]:
        """Encode sentences given as an NMT's ids: the same ones if its subwords are the same."""
        if tokenizer.sha256 != self._tokenizer.sha256:
            return super().encode_ids(sentences, tokenizer)
        return [[*self._prefix, *ids, *self._suffix] for ids in sentences]


class OwnWordpieces(_OurSubwords):
    """The subwords of a trained NMT whose own encoder stands in for a pretrained one.

    Its input is "c1 </s> ... cn </s> sentence </s>".
    """

    def __init__(self, folder: Path, max_length: int | None = None) -> None:
        try:
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
            is_fused, self._source = card["fusion"] is not None, card["source"]
            limit = int(card["model"]["max_positions"])
            languages = card.get("languages", ())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / CARD} is damaged") from error
        if is_fused:
            raise UserError(f"{folder} is a fused model; only a plain one can stand in for BERT")
        if languages:
            raise UserError(
                f"{folder} is a model of several directions; only one of one direction can stand "
                "in for BERT"
            )
        self._tokenizer = load_tokenizer(folder, self._source)
        end = [Vocabulary.eos]
        super().__init__(
            [],
            end,
            end,
            max_length=min(limit, max_length or limit),
            pad=Vocabulary.pad,
            mask=self._tokenizer.vocabulary.tags.get(MASK),
            separator=None,
            special=frozenset(end),
            vocabulary_size=len(self._tokenizer.vocabulary),
            fingerprint=self._tokenizer.sha256,
        )

    def save(self, folder: Path) -> None:
        """Write the subwords and the dictionary."""
        self._tokenizer.save(folder, self._source)


class PretrainedSubwords(_OurSubwords):
    """Our own subwords, of an XLM that ``unsup pretrain`` made: its ids are those of the NMT.

    Its input is "</s> c1 </s> ... cn </s> sentence </s>".

    Args:
        folder: Of the XLM, with the dictionary and the subwords that its languages share.
        config: What the folder's config.json says.
    """

    def __init__(self, folder: Path, config: Any, max_length: int | None = None) -> None:
        self._languages = dictionary_languages(folder)
        self._tokenizer = load_tokenizer(folder, self._languages[0])
        vocabulary, end = self._tokenizer.vocabulary, [Vocabulary.eos]
        if config.vocab_size != len(vocabulary):
            raise UserError(
                f"{folder} is damaged: its dictionary has {len(vocabulary):,} symbols, but the "
                f"encoder's config.json says {config.vocab_size:,}"
            )
        limit = int(config.max_position_embeddings)
        super().__init__(
            end,
            end,
            end,
            max_length=min(limit, max_length or limit),
            pad=Vocabulary.pad,
            mask=vocabulary.tags.get(MASK),
            separator=None,
            special=frozenset(end),
            vocabulary_size=len(vocabulary),
            # Not that of the subwords alone: an NMT's own encoder has another template.
            fingerprint=hashlib.sha256(f"</s> {self._tokenizer.sha256}".encode()).hexdigest(),
        )

    def save(self, folder: Path) -> None:
        """Write the subwords and the dictionary, for every language."""
        for language in self._languages:
            self._tokenizer.save(folder, language)


def dictionary_languages(folder: Path) -> list[str]:
    """Return the languages whose dictionaries lie in a folder: none, but in those of ours."""
    return sorted(path.name[len("dict.") : -len(".txt")] for path in folder.glob("dict.*.txt"))


def own_model_folder(name: str) -> Path | None:
    """Return the model folder if ``name`` is a RUN of ours, or None."""
    for folder in (Path(name) / "model", Path(name)):
        if (folder / CARD).is_file():
            return folder
    return None
