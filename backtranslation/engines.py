"""What translates the blocks of a corpus: our decoder, or CTranslate2 where that does the same."""

import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from backtranslation.config import ComputeType, EngineName, NoiseConfig
from backtranslation.noise import add_noise
from backtranslation.shards import Translated
from bertfused.checkpoint import load_card, model_folder
from bertfused.config import SearchConfig
from bertfused.errors import UserError
from bertfused.interop.ctranslate2 import CTranslate2Search, exported, unsuited_search
from bertfused.translate import Long, Translator

_logger = logging.getLogger(__name__)


@runtime_checkable
class Engine(Protocol):
    """Translates lines, one translation each; the same for a line in every run."""

    name: str

    def translate(self, lines: Sequence[str], first_line: int) -> Translated:
        """Translate lines of a corpus, the first of which has this number, from 0."""
        ...


class TorchEngine:
    """Our decoder; any RUN, any search.

    Args:
        batch_tokens: Source tokens of a batch; it changes the speed only.
    """

    name = "torch"

    def __init__(
        self, translator: Translator, search: SearchConfig, *, batch_tokens: int, long: Long
    ) -> None:
        self._translator = translator
        # No synthetic text has the unknown symbol.
        self._search = search.model_copy(update={"unk_penalty": math.inf})
        self._batch_tokens, self._long = batch_tokens, long

    def translate(self, lines: Sequence[str], first_line: int) -> Translated:
        self._translator.counts.clear()
        translations = self._translator.translate(
            lines,
            self._search,
            batch_tokens=self._batch_tokens,
            long=self._long,
            first_line=first_line,
        )
        texts = [translation.text for translation in translations]
        return Translated(texts, Counter(self._translator.counts))


class CTranslate2Engine:
    """CTranslate2 on a plain RUN, for what it does as our decoder does it.

    Two things may differ: near-ties, and beams of which a translation reached the longest length.

    Args:
        batch_tokens: Source tokens of a batch.
    """

    name = "ctranslate2"

    def __init__(
        self,
        run: Path,
        search: SearchConfig,
        *,
        batch_tokens: int,
        long: Long,
        device: str = "auto",
        compute_type: ComputeType = "float32",
    ) -> None:
        self._search, self._long, self._batch_tokens = search, long, batch_tokens
        self._ours = Translator.load(run, device="cpu")  # reads, cuts and writes the lines
        member = self._ours.members[0]
        self._source, self._target = member.source, member.target
        self._longest = min(search.max_length_b, member.card.model.max_positions - 1)
        self._theirs = CTranslate2Search(
            run, device=device, compute_type=compute_type, threads=torch.get_num_threads()
        )

    def translate(self, lines: Sequence[str], first_line: int) -> Translated:
        counts = self._ours.counts
        counts.clear()
        parts: list[tuple[int, str]] = []
        for number, line in enumerate(lines):
            if line.strip():
                where = f"line {first_line + number + 1}"
                parts += [(number, p) for p in self._ours.cut_to_fit(line, self._long, where)]
        found = self._theirs.translate(
            self._source.encode_batch([text for _, text in parts]),
            self._search,
            longest=self._longest,
            batch_tokens=self._batch_tokens,
        )
        texts: list[list[str]] = [[] for _ in lines]
        for (number, _), ids in zip(parts, found, strict=True):
            if len(ids) >= self._longest:
                counts["translations ended by the maximum length"] += 1
            texts[number].append(self._target.decode(ids))
        return Translated([" ".join(text) for text in texts], Counter(counts))


class NoisyEngine:
    """Another engine with words dropped, blanked and swapped in what it writes."""

    def __init__(self, engine: Engine, noise: NoiseConfig) -> None:
        self.name = engine.name
        self._engine, self._noise = engine, noise

    def translate(self, lines: Sequence[str], first_line: int) -> Translated:
        texts, counts = self._engine.translate(lines, first_line)
        noisy = [add_noise(text, first_line + i, self._noise) for i, text in enumerate(texts)]
        return Translated(noisy, counts)


def check_engine(name: EngineName, search: SearchConfig) -> None:
    """Refuse CTranslate2 for a search that it cannot do, or where it is not installed.

    Raises:
        UserError: Saying why.
    """
    reason = _unsuited(search)
    if name == "ctranslate2" and reason is not None:
        raise UserError(f"engine ctranslate2: {reason}")


def _unsuited(search: SearchConfig) -> str | None:
    if importlib.util.find_spec("ctranslate2") is None:
        return "it is not installed (pip install 'bert-fused-nmt[ctranslate2]')"
    return unsuited_search(search)


def choose_engine(name: EngineName, run: Path, search: SearchConfig) -> str:
    """Return "torch" or "ctranslate2": the latter for "auto" where it does the same.

    That is seen by an export of the model and a comparison in greedy search.

    Raises:
        UserError: If CTranslate2 is asked for and cannot.
    """
    if name == "torch":
        return name
    is_fused = load_card(model_folder(run)).fusion is not None
    reason = f"{run} is fused" if is_fused else _unsuited(search)
    if name == "ctranslate2":
        if reason is not None:
            raise UserError(f"engine ctranslate2: {reason}")
        return name
    if reason is not None:
        return "torch"
    try:
        exported(run)
    except UserError as error:
        _logger.warning("translating with our decoder: %s", error)
        return "torch"
    return "ctranslate2"
