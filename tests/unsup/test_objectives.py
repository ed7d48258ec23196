from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from bertfused.batch import shift_right
from bertfused.fit import Setup
from bertfused.store import IdStore
from bertfused.training import Place
from bertfused.translate import SourceLine
from bertfused.vocab import Vocabulary
from tests.tiny_texts import Texts
from unsup.config import ObjectivesConfig
from unsup.fit import averaged, both_ways, set_up
from unsup.objectives import ObjectiveBatch, Sentences, UnsupervisedLoss, steps

CPU = torch.device("cpu")
OPTIONS = {"batch_tokens": 100, "accumulate": 1, "seed": 1}
MILD = {"objectives": {"denoising": "0", "backtranslation": "1"}, "train": {"validate_every": 4}}


def stores_of(texts: Texts) -> tuple[IdStore, IdStore]:
    return texts.data.mono("ab"), texts.data.mono("xy")


def sentences_of(texts: Texts, **objectives: str) -> Sentences:
    weights = {"denoising": "0", "backtranslation": "0"} | objectives
    stores = stores_of(texts)
    return Sentences(stores, stores, ObjectivesConfig.model_validate(weights))


def module_of(texts: Texts, **sections: dict[str, object]) -> tuple[Setup, UnsupervisedLoss]:
    setup = set_up(texts.with_(**sections), texts.data, None, CPU)
    module = setup.trainer.module
    assert isinstance(module, UnsupervisedLoss)
    return setup, module


def batch_of(module: UnsupervisedLoss, sentences: Sentences, *key: int) -> ObjectiveBatch:
    """Make the first batch of the only objective."""
    module.begin_step(*key, drop_net=0.0)
    return module.collate(sentences, sentences.batches(100)[0])


# Which micro-batches


def test_every_number_is_found_again(texts: Texts) -> None:
    sentences = sentences_of(texts, denoising="1", mass="1")
    first, second = stores_of(texts)
    assert len(sentences) == len(first) + len(second)
    seen = {"denoising": set(), "mass": set()}
    for numbers in sentences.batches(100):
        objective, rows = sentences.locate(numbers)
        seen[objective] |= {*rows.tolist()}
        found = sentences.sentences(rows)
        assert [len(ids) for ids in found] == sentences.lengths[0][numbers].tolist()
        for row, language, ids in zip(rows.tolist(), sentences.languages(rows), found, strict=True):
            assert language == int(row >= len(first))
            own = first[row] if language == 0 else second[row - len(first)]
            assert ids.tolist() == own.tolist()
    assert seen["denoising"] == seen["mass"] == set(range(len(first) + len(second)))


def test_an_update_has_every_objective_that_counts(texts: Texts) -> None:
    sentences = sentences_of(texts, denoising="1", backtranslation="0:0,2:0,3:1")
    updates = list(islice(steps(sentences, **OPTIONS | {"accumulate": 2}, start=Place()), 4))
    found = [[sentences.locate(numbers)[0] for numbers in step.examples] for step in updates]
    denoising = ["denoising", "denoising"]
    both = [*denoising, "backtranslation", "backtranslation"]
    assert found == [denoising, denoising, both, both]
    for step in updates:
        assert step.target_tokens == sum(
            int(sentences.lengths[0][numbers].sum()) for numbers in step.examples
        )


def test_an_objective_goes_through_all_sentences_in_a_new_order_each_epoch(texts: Texts) -> None:
    sentences = sentences_of(texts, denoising="1")
    size = len(sentences.batches(100))
    updates = list(islice(steps(sentences, **OPTIONS, start=Place()), 2 * size))
    seen = [
        np.concatenate([step.examples[0] for step in part])
        for part in (updates[:size], updates[size:])
    ]
    start = sentences.batches(100)[0].min() // 240 * 240
    everything = [*range(start, start + 240)]
    assert sorted(seen[0]) == sorted(seen[1]) == everything
    assert seen[0].tolist() != seen[1].tolist()
    assert [step.after.epoch for step in updates] == [n // size for n in range(1, 2 * size + 1)]


def test_updates_go_on_where_they_stopped(texts: Texts) -> None:
    sentences = sentences_of(texts, denoising="1", backtranslation="0:0,30:0,31:1")
    whole = list(islice(steps(sentences, **OPTIONS, start=Place()), 60))
    for stop in (1, 29, 30, 41):
        rest = list(islice(steps(sentences, **OPTIONS, start=whole[stop - 1].after), 60 - stop))
        for before, after in zip(whole[stop:], rest, strict=True):
            assert before.after == after.after
            for own, other in zip(before.examples, after.examples, strict=True):
                assert own.tolist() == other.tolist()


def test_what_is_translated_together_is_what_comes(texts: Texts) -> None:
    """Up to the next multiple of three, over the end of an epoch, while it counts."""
    sentences = sentences_of(texts, denoising="1", backtranslation="0:1,22:1,23:0")
    options = OPTIONS | {"accumulate": 2, "together": 3}
    updates, coming = [], []
    for step in islice(steps(sentences, **options, start=Place()), 22):
        updates.append(step.examples[2:])
        coming.append([sentences.coming(own) for own in step.examples[2:]])
    assert len(sentences.batches_of("backtranslation", 100, None)) < 44
    for number, found in enumerate(coming):
        last = min(number // 3 * 3 + 3, 22)
        for micro, batches in enumerate(found):
            wanted = [updates[later][micro] for later in range(number, last)]
            assert [own.tolist() for own in batches] == [own.tolist() for own in wanted]
    resumed = next(steps(sentences, **options, start=Place(0, 4)))
    assert [len(sentences.coming(own)) for own in resumed.examples[2:]] == [2, 2]


# What is made of them


def targets_of(sentences: Sentences) -> list[list[int]]:
    _, rows = sentences.locate(sentences.batches(100)[0])
    return [ids.tolist() for ids in sentences.sentences(rows)]


def languages_of(made: ObjectiveBatch) -> tuple[list[int], list[int]]:
    assert made.batch.source_language is not None
    assert made.batch.target_language is not None
    return made.batch.source_language.tolist(), made.batch.target_language.tolist()


def test_denoising_goes_from_a_noised_sentence_to_itself(texts: Texts) -> None:
    _, module = module_of(texts)
    sentences = sentences_of(texts, denoising="1")
    made = batch_of(module, sentences, 1, 1, 0)
    assert made.batch.target is not None
    for row, target in zip(made.batch.target.tolist(), targets_of(sentences), strict=True):
        assert row[: len(target)] == target
    own = sentences.languages(sentences.locate(sentences.batches(100)[0])[1])
    assert languages_of(made) == (own, own)
    assert made.batch.source.tolist() != made.batch.target.tolist()
    again, other = (batch_of(module, sentences, 1, number, 0) for number in (1, 2))
    assert torch.equal(made.batch.source, again.batch.source)
    assert made.batch.source.tolist() != other.batch.source.tolist()


def test_back_translation_is_the_greedy_translation_of_that_moment(texts: Texts) -> None:
    setup, module = module_of(texts)
    sentences = sentences_of(texts, backtranslation="1")
    module.train()
    made = batch_of(module, sentences, 1, 1, 0)
    own = sentences.languages(sentences.locate(sentences.batches(100)[0])[1])
    assert set(own) == {0, 1}
    assert languages_of(made) == ([1 - language for language in own], own)
    assert setup.trainer.module.model.training
    tokenizer = texts.data.tokenizers()[0]
    translators = both_ways(module.translator.translator.members[0], CPU)
    for row, target, language in zip(
        made.batch.source.tolist(), targets_of(sentences), own, strict=True
    ):
        line = SourceLine(tokenizer.decode(target))
        (wanted,) = translators[language].translate([line], module.translator.search)
        assert tokenizer.decode([id for id in row if id > 3]) == wanted.text


def test_translations_of_the_next_updates_are_made_with_those_of_the_first(texts: Texts) -> None:
    """By the weights of that moment, each line as it is translated in a batch of its own."""
    setup, module = module_of(texts, generate={"updates": 2, "sampling": None}, **MILD)
    alone, other = module_of(texts, **MILD)
    updates = setup.steps(setup.train, **OPTIONS, start=Place())
    first = next(updates)
    coming = setup.train.coming(first.examples[-1])
    module.begin_step(1, 1, 0, drop_net=0.0)
    module.collate(setup.train, first.examples[-1])
    assert len(coming) == 2
    other.begin_step(1, 2, 0, drop_net=0.0)
    wanted = other.collate(alone.train, coming[1]).batch
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.zero_()
    second = next(updates)
    module.begin_step(1, 2, 0, drop_net=0.0)
    made = module.collate(setup.train, second.examples[-1]).batch
    assert torch.equal(made.source, wanted.source)
    assert torch.equal(made.target, wanted.target)
    assert "generation_seconds" in module.take_values()
    third = next(updates)
    module.begin_step(1, 3, 0, drop_net=0.0)
    module.collate(setup.train, third.examples[-1])
    assert "generation_seconds" in module.take_values()  # translated anew


def test_back_translation_gives_no_gradient_to_the_translator(texts: Texts) -> None:
    _, module = module_of(texts)
    made = batch_of(module, sentences_of(texts, backtranslation="1"), 1, 1, 0)
    assert not made.batch.source.requires_grad
    total, _ = module(made)
    total.backward()
    assert any(p.grad is not None for p in module.model.parameters())


def test_translations_without_an_end_are_counted(texts: Texts) -> None:
    _, module = module_of(texts, generate={"max_length_a": 0.0, "max_length_b": 3})
    made = batch_of(module, sentences_of(texts, backtranslation="1"), 1, 1, 0)
    cut = (made.batch.source_mask.sum(1) > 3).sum().item()
    assert cut > 0
    assert module.take_values()["generation_cut"] == cut / len(made.batch.source)
    assert module.take_values() == {}


def test_a_masked_span_is_predicted_from_the_rest(texts: Texts) -> None:
    _, module = module_of(texts)
    sentences = sentences_of(texts, mass="1")
    made = batch_of(module, sentences, 1, 1, 0).batch
    assert made.target is not None
    assert made.target_mask is not None
    assert made.decoder_input is not None
    mask = module.noise.mask
    shifted = shift_right(made.target)
    masked = kept = 0
    for source, target, wanted, given, before in zip(
        made.source, made.target, made.target_mask, made.decoder_input, shifted, strict=True
    ):
        length = int((target != Vocabulary.pad).sum()) - 1  # without EOS
        places = wanted.nonzero()[:, 0].tolist()
        assert places == list(range(places[0], places[-1] + 1))
        assert len(places) == max(1, round(length / 2))
        assert torch.equal(source[~wanted], target[~wanted])
        masked += int((source[wanted] == mask).sum())
        kept += int((source[wanted] == target[wanted]).sum())
        shown = [place for place in range(len(given)) if given[place] != mask]
        assert shown == places[1:]
        assert torch.equal(given[shown], before[shown])
    assert masked > 5 * kept


def test_only_what_is_predicted_counts(texts: Texts) -> None:
    _, module = module_of(texts)
    sentences = sentences_of(texts, mass="1")
    made = batch_of(module, sentences, 1, 1, 0).batch
    assert made.target_mask is not None
    step = next(steps(sentences, **OPTIONS, start=Place()))
    assert step.target_tokens == sentences.target_tokens(step.examples[0])
    assert sentences.target_tokens(sentences.batches(100)[0]) == int(made.target_mask.sum())


def test_a_weight_scales_the_loss_but_not_what_is_logged(texts: Texts) -> None:
    _, module = module_of(texts)
    made = batch_of(module, sentences_of(texts, denoising="1"), 1, 1, 0)
    module.eval()
    whole, half = module.loss(made), module.loss(replace(made, weight=0.5))
    assert half.total.item() == pytest.approx(whole.total.item() / 2)
    assert half.nll.item() == whole.nll.item()
    values = module.take_values()
    assert values["denoising_nll"] == pytest.approx(whole.nll.item() / whole.tokens)
    assert module.take_values() == {}


# The model


def test_another_language_gives_other_words(texts: Texts) -> None:
    _, module = module_of(texts)
    example = batch_of(module, sentences_of(texts, denoising="1"), 1, 1, 0).batch
    module.eval()
    with torch.no_grad():
        logits = module.model(example)
        assert example.target_language is not None
        swapped = module.model(replace(example, target_language=1 - example.target_language))
        of_source = module.model(replace(example, source_language=1 - example.target_language))
    assert not torch.allclose(logits, swapped, atol=1e-3)
    assert not torch.allclose(logits, of_source, atol=1e-3)


def test_the_teacher_has_the_averages_at_any_time(texts: Texts) -> None:
    setup, module = module_of(
        texts, optim={"ema": 0.5}, objectives={"teacher": "average", "denoising": "1"}
    )
    teacher = module.translator.translator.members[0].model
    assert teacher is not module.model
    updates = setup.steps(setup.train, **OPTIONS, start=Place())
    for number in (1, 2):
        setup.trainer.update(setup.train, next(updates), number)
        assert setup.trainer.average is not None
        for name, parameter in teacher.named_parameters():
            assert torch.equal(parameter, setup.trainer.average[name]), name
            assert parameter.grad is None
    assert teacher.output.weight is teacher.decoder.embed.tokens.weight
    assert averaged(module.model, setup.trainer).output.weight is not teacher.output.weight


def test_few_tokens_are_warned_of(texts: Texts, caplog: pytest.LogCaptureFixture) -> None:
    module_of(texts, train={"batch_tokens": 20})
    assert "an update has about" in caplog.text
    assert "unsupervised training needs 1,000 or more" in caplog.text
