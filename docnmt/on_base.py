"""Translate and score with context layers on a frozen base."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bertfused.batch import Example, pad_ids, token_batches
from bertfused.config import SearchConfig
from bertfused.model import DecoderState, Memory
from bertfused.scoring import PairScore, target_log_probs
from bertfused.search import Decoder, Hypothesis, StatefulDecoder, beam_search
from bertfused.translate import Member, SourceLine, Translator
from bertfused.vocab import Vocabulary
from docnmt.batches import collate_in_context, predict, target_of
from docnmt.cadec import draft_of
from docnmt.context import (
    Context,
    ContextModel,
    Current,
    Draft,
    Encoded,
    Places,
    target_states,
)
from docnmt.sequential import Pair, Sentence, by_length, history_of


class ContextSystem:
    """A model with context layers on a frozen base."""

    def __init__(self, model: ContextModel, member: Member, device: torch.device) -> None:
        self.model = model.to(device)
        self.base = Translator([member], device)
        self.sentences = model.sentences
        self.reads_target = model.reads_target

    @torch.inference_mode()
    def encode(
        self, sentences: Sequence[Sentence], search: SearchConfig, batch_tokens: int
    ) -> None:
        """Encode every sentence once; find its draft too, where the model corrects one."""
        self.model.eval()
        member = self.base.members[0]
        for batch in by_length(sentences, batch_tokens):
            examples = [sentence.example for sentence in batch]
            encoded = Encoded(self.model.base, member.batch(examples, self.base.device))
            states = self.model.source_states(encoded)
            for row, sentence in enumerate(batch):
                length = len(sentence.example.source)
                sentence.source_states = states[row, :length]
                memory = encoded.memory if self.model.reads_base else encoded.mask_alone
                sentence.memory = _memory_of_row(memory, row, sentence.example)
        if self.model.wants_draft:
            in_context = [sentence for sentence in sentences if sentence.previous]
            for batch in by_length(in_context, batch_tokens):
                self._find_drafts(batch, search)

    def _find_drafts(self, sentences: Sequence[Sentence], search: SearchConfig) -> None:
        """Translate sentences by the base alone, by beam search whatever was asked for."""
        best = search.model_copy(update={"sampling": None, "temperature": 1.0})
        decoder = DecoderState(self.model.base, self._current(sentences).memory)
        lengths = [len(sentence.example.source) for sentence in sentences]
        limits, special = self.base.max_lengths(lengths, best), self.base.special_ids
        found = beam_search(decoder, limits, best, nbest=1, special=special)
        for sentence, nbest_list in zip(sentences, found, strict=True):
            sentence.draft = nbest_list[0].ids

    @torch.inference_mode()
    def search(
        self, sentences: Sequence[Sentence], search: SearchConfig, nbest: int, seeds: Sequence[int]
    ) -> list[list[Hypothesis]]:
        """Translate sentences, those without context by the base alone.

        Where translations are read, the states that predicted each token are kept from the search
        if the decoder has them; else ``finish`` asks the base's decoder.
        """
        current = self._current(sentences)
        decoder: Decoder
        if not sentences[0].previous and self.model.reads_base:
            decoder = DecoderState(self.model.base, current.memory)
        elif not sentences[0].previous:
            examples = [sentence.example for sentence in sentences]
            decoder = self.base.members[0].start(examples, self.base.device)
        else:
            needed = list(
                dict.fromkeys(before for sentence in sentences for before in sentence.previous)
            )
            place = {before: number for number, before in enumerate(needed)}
            previous = [[place[before] for before in sentence.previous] for sentence in sentences]
            source = self._context(previous, [before.source_states for before in needed])
            target = replace(source, states=source.states[:, :0])  # not read
            if self.reads_target:
                target = self._context(previous, [before.target_states for before in needed])
            decoder = self.model.start(current, source, target)
        lengths = [len(sentence.example.source) for sentence in sentences]
        prefixes = self.base.prefix_ids([sentence.source_line.prefix for sentence in sentences])
        states_of = None
        if self.reads_target and isinstance(decoder, StatefulDecoder):
            decoder.keep_states()
            states_of = decoder.states
        found = self.base.run_search(
            decoder, lengths, prefixes, search, nbest, seeds, states_of=states_of
        )
        for sentence, (best, *_) in zip(sentences, found, strict=True):
            if best.states is not None:
                ids = torch.tensor(best.ids, device=self.base.device)
                embed = self.model.base.decoder.embed
                sentence.target_states = target_states(embed, ids, best.states)
        return found

    @torch.inference_mode()
    def finish(self, sentences: Sequence[Sentence]) -> None:
        """Represent the translations by the base's decoder, where the search did not do it."""
        missing = [sentence for sentence in sentences if sentence.target_states is None]
        if self.reads_target and missing:
            rows = [sentence.ids or [Vocabulary.eos] for sentence in missing]
            represented = self._represent(rows, self._current(missing))
            for row, sentence in enumerate(missing):
                sentence.target_states = represented.states[row, : len(rows[row])]
        for sentence in sentences:
            sentence.memory, sentence.draft, sentence.previous = None, None, ()

    def _represent(self, rows: Sequence[Sequence[int]], current: Current) -> Draft:
        ids, _ = pad_ids(rows, Vocabulary.pad)
        return draft_of(self.model.base, current, ids.to(self.base.device))

    def _current(self, sentences: Sequence[Sentence]) -> Current:
        """Collect what is known of some sentences before they are translated."""
        source, mask = pad_ids([sentence.example.source for sentence in sentences], Vocabulary.pad)
        memories = [sentence.memory for sentence in sentences if sentence.memory is not None]
        assert len(memories) == len(sentences)
        bert_states = [
            memory.bert_states[0] for memory in memories if memory.bert_states is not None
        ]
        bert_masks = [memory.bert_mask[0] for memory in memories if memory.bert_mask is not None]
        memory = Memory(
            pad_sequence([memory.states[0] for memory in memories], batch_first=True),
            mask.to(self.base.device),
            pad_sequence(bert_states, batch_first=True) if bert_states else None,
            pad_sequence(bert_masks, batch_first=True) if bert_masks else None,
        )
        current = Current(source.to(self.base.device), memory)
        drafts = [sentence.draft for sentence in sentences if sentence.draft is not None]
        if not drafts:
            return current
        return replace(current, draft=self._represent(drafts, current))

    def _context(
        self,
        previous: Sequence[Sequence[int]],
        given: Sequence[Float[Tensor, "_ width"] | None],
    ) -> Context:
        """Join what the previous sentences of each sentence give to it."""
        states = [state for state in given if state is not None]
        assert len(states) == len(given)
        lengths = np.array([len(state) for state in states], dtype=np.int64)
        return Places.of(previous, lengths).to(self.base.device).gather(torch.cat(states))

    @torch.inference_mode()
    def score(
        self,
        pairs: Sequence[tuple[SourceLine, str]],
        batch_tokens: int,
        label_smoothing: float,
    ) -> list[PairScore]:
        """Score targets in the given contexts, those without one by the base alone.

        In a batch a previous sentence is encoded once, however many contexts it is part of. Drafts
        are searched for as the run's own search settings say.
        """
        self.model.eval()
        documents = self.base.members[0].card.documents
        bert_previous = documents["previous"] if documents else 0
        histories = [history_of(line, target, bert_previous) for line, target in pairs]
        distinct = list(dict.fromkeys(pair for history in histories for pair in history))
        examples = dict(zip(distinct, self._examples(distinct), strict=True))
        in_context = [history[-1] for history in histories if len(history) > 1]
        drafts = self._drafts(in_context, examples, batch_tokens)
        scores = [PairScore(0.0, 0)] * len(pairs)
        lengths = [
            np.array(
                [len(target_of(examples[history[-1]])) for history in histories], dtype=np.int64
            ),
            np.array([len(examples[history[-1]].source) for history in histories], dtype=np.int64),
        ]
        for numbers in token_batches(lengths, batch_tokens):
            batch_scores = self._score(
                [histories[i] for i in numbers],
                examples,
                drafts,
                label_smoothing,
            )
            for i, score in zip(numbers, batch_scores, strict=True):
                scores[i] = score
        return scores

    def _score(
        self,
        histories: Sequence[Sequence[Pair]],
        examples: Mapping[Pair, Example],
        drafts: Mapping[Pair, Sequence[int]] | None,
        label_smoothing: float,
    ) -> list[PairScore]:
        member = self.base.members[0]
        contexts = [history[:-1][-self.sentences :] for history in histories]
        before = list(dict.fromkeys(pair for context in contexts for pair in context))
        place = {pair: len(histories) + number for number, pair in enumerate(before)}
        batch = collate_in_context(
            [examples[history[-1]] for history in histories] + [examples[pair] for pair in before],
            [[place[pair] for pair in context] for context in contexts],
            range(len(histories)),
            None if member.encoder is None else member.encoder.bert_ids,
        ).to(self.base.device)

        def draft(numbers: Sequence[int], current: Current, target: Int[Tensor, "_ _"]) -> Draft:
            assert drafts is not None
            return self._represent([drafts[histories[i][-1]] for i in numbers], current)

        scores = [PairScore(0.0, 0)] * len(histories)
        for prediction in predict(
            self.model,
            member.encoder,
            batch,
            mask_special=member.card.fusion is not None and member.card.fusion.mask_special,
            draft=None if drafts is None else draft,
        ):
            log_probs = prediction.output(prediction.hidden).float().log_softmax(-1)
            picked = target_log_probs(log_probs, prediction.target, label_smoothing)
            sums = picked.double().mul(prediction.mask).sum(1).tolist()
            tokens = prediction.mask.sum(1).tolist()
            for number, total, count in zip(prediction.task.numbers, sums, tokens, strict=True):
                scores[number] = PairScore(total, count)
        return scores

    def _examples(self, pairs: Sequence[Pair]) -> list[Example]:
        lines = [SourceLine(pair.source, pair.bert_context) for pair in pairs]
        targets = [pair.target for pair in pairs]
        return self.base.members[0].examples_with_targets(lines, targets, self.base.counts)

    def _drafts(
        self,
        pairs: Sequence[Pair],
        examples: Mapping[Pair, Example],
        batch_tokens: int,
    ) -> dict[Pair, list[int]] | None:
        """Translate sentences with the base, each once, where the model wants that."""
        if not self.model.wants_draft:
            return None
        sources = {pair._replace(target=""): pair for pair in pairs}
        sentences = {
            source: Sentence(0, 0, SourceLine(source.source), replace(examples[pair], target=None))
            for source, pair in sources.items()
        }
        self.encode(list(sentences.values()), self.base.search, batch_tokens)
        for batch in by_length(list(sentences.values()), batch_tokens):
            self._find_drafts(batch, self.base.search)
        return {pair: sentences[pair._replace(target="")].draft or [] for pair in pairs}


def _memory_of_row(memory: Memory, row: int, example: Example) -> Memory:
    """Cut the memory of one sentence out of a batch, without its padding."""
    length, rows = len(example.source), slice(row, row + 1)
    bert_states = bert_mask = None
    if memory.bert_states is not None and memory.bert_mask is not None:
        # Not to the last True of the mask: special positions may be hidden.
        pieces = len(example.bert if example.bert is not None else ())
        bert_states, bert_mask = memory.bert_states[rows, :pieces], memory.bert_mask[rows, :pieces]
    return Memory(memory.states[rows, :length], memory.mask[rows, :length], bert_states, bert_mask)
