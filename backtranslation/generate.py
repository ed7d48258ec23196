"""Translate a monolingual corpus, at any size and in any number of pieces."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backtranslation.config import ComputeType, EngineName, NoiseConfig
from backtranslation.engines import (
    CTranslate2Engine,
    Engine,
    NoisyEngine,
    TorchEngine,
    choose_engine,
)
from backtranslation.shards import Manifest, ShardFolder
from bertfused.checkpoint import WEIGHTS, load_card, model_folder
from bertfused.config import InferencePrecision, SearchConfig
from bertfused.errors import UserError
from bertfused.text import count_lines, sha256_file
from bertfused.translate import Long, Translator

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """A corpus, the RUN that translates it, and how.

    Attributes:
        run: From the language of the corpus into that of the synthetic text.
        corpus: Monolingual text, one sentence a line.
        compute_type: Of CTranslate2.
    """

    run: Path
    corpus: Path
    search: SearchConfig
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    engine: EngineName = "auto"
    compute_type: ComputeType = "float32"
    batch_tokens: int = 4096
    long: Long = "split"
    device: str = "auto"
    encoder: str | None = None
    encoder_precision: InferencePrecision = "fp32"

    def folder(self, out: Path, shards: int) -> ShardFolder:
        """Return the folder of the generation, checked against what is in it.

        Raises:
            UserError: If it was begun from something else, or the RUN reads documents.
        """
        card = load_card(model_folder(self.run))
        if card.documents is not None:
            raise UserError(f"{self.run} reads documents; generate needs a sentence-level model")
        lines = count_lines(self.corpus)
        found = ShardFolder(out, card.target, lines, shards, self._made_from(lines))
        found.check()
        return found

    def open_engine(self) -> Engine:
        """Load the model."""
        engine: Engine
        if self._engine_name() == "ctranslate2":
            engine = CTranslate2Engine(
                self.run,
                self.search,
                batch_tokens=self.batch_tokens,
                long=self.long,
                device=self.device,
                compute_type=self.compute_type,
            )
        else:
            translator = Translator.load(
                self.run,
                device=self.device,
                encoder=self.encoder,
                encoder_precision=self.encoder_precision,
            )
            engine = TorchEngine(
                translator, self.search, batch_tokens=self.batch_tokens, long=self.long
            )
        return NoisyEngine(engine, self.noise) if self.noise.is_any else engine

    def _engine_name(self) -> str:
        return choose_engine(self.engine, self.run, self.search)

    def _made_from(self, lines: int) -> dict[str, Any]:
        folder = model_folder(self.run)
        card = load_card(folder)
        engine = self._engine_name()
        return {
            "corpus": sha256_file(self.corpus),
            "lines": lines,
            "model": sha256_file(folder / WEIGHTS),
            "text_files": card.text_files,
            "languages": [card.source, card.target],
            "engine": engine if engine == "torch" else f"{engine} {self.compute_type}",
            "encoder_precision": self.encoder_precision,
            "search": self.search.model_dump(mode="json"),
            "noise": self.noise.model_dump(mode="json"),
            "long": self.long,
        }


def generate(
    generation: Generation,
    folder: ShardFolder,
    *,
    shard: int | None = None,
    progress: Callable[[int], object] = lambda lines: None,
) -> Manifest | None:
    """Translate the corpus, or one shard of it, from where an earlier call was stopped.

    Args:
        folder: What ``generation.folder`` gave.
        shard: Number of the only one to translate, from 1; ``None``: all.
        progress: Called with the lines that are done since the last call.

    Returns:
        The manifest of the whole corpus, once all shards are complete.

    Raises:
        UserError: If there is no such shard, or another process is at it.
    """
    pending = [number for number in folder.numbers(shard) if not folder.is_complete(number)]
    if pending:
        engine = generation.open_engine()
        start, translated = time.perf_counter(), 0
        for number in pending:
            before = folder.done(number)
            progress(before)
            for lines in folder.write(number, generation.corpus, engine.translate):
                progress(lines)
                translated += lines
        seconds = time.perf_counter() - start
        _logger.info(
            "%s lines in %.0f s, %.1f a second, with %s",
            f"{translated:,}",
            seconds,
            translated / max(seconds, 1e-9),
            engine.name,
        )
    return folder.join()
