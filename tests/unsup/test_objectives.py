from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from bertfused.batch import collate, shift_right
from bertfused.fit import Setup
from bertfused.store import IdStore
from bertfused.training import Place
from bertfused.translate import SourceLine
from bertfused.vocab import Vocabulary
from tests.tiny_texts import Texts
from unsup.config import ObjectivesConfig
from unsup.fit import averaged, both_ways, set_up
from unsup.objectives import Sentences, Task, TaskBatch, UnsupervisedLoss, steps

CPU = torch.device("cpu")
OPTIONS = {"batch_tokens": 100, "accumulate": 1, "seed": 1}


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


def batch_of(module: UnsupervisedLoss, sentences: Sentences, *key: int) -> TaskBatch:
    module.begin_step(*key, drop_net=0.0)
    (task,) = {sentences.tasks_at(1)[0]}
    return module.collate(sentences, sentences.task_batches(task, 100, None)[0])


# Which micro-batches


def test_every_number_is_found_again(texts: Texts) -> None:
    sentences = sentences_of(texts, denoising="1")
    for task in sentences.tasks:
        for numbers in sentences.task_batches(task, 100, None):
            found, rows = sentences.locate(numbers)
            assert found == task
            sizes = sentences.stores[task.language].sizes[rows]
            assert sizes.tolist() == sentences.lengths[0][numbers].tolist()


def test_an_update_has_every_objective_in_both_languages(texts: Texts) -> None:
    sentences = sentences_of(texts, denoising="1", backtranslation="0:0,2:0,3:1")
    updates = list(islice(steps(sentences, **OPTIONS, start=Place()), 4))
    tasks = [[sentences.locate(numbers)[0] for numbers in step.examples] for step in updates]
    denoising = [Task("denoising", 0), Task("denoising", 1)]
    both = [*denoising, Task("backtranslation", 0), Task("backtranslation", 1)]
    assert tasks == [denoising, denoising, both, both]
    for step in updates:
        assert step.target_tokens == sum(
            int(sentences.lengths[0][numbers].sum()) for numbers in step.examples
        )


def test_a_task_goes_through_its_sentences_in_a_new_order_each_epoch(texts: Texts) -> None:
    sentences = sentences_of(texts, denoising="1")
    size = len(sentences.task_batches(sentences.tasks[0], 100, None))
    updates = list(islice(steps(sentences, **OPTIONS, start=Place()), 2 * size))
    seen = [
        np.concatenate([step.examples[0] for step in part])
        for part in (updates[:size], updates[size:])
    ]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(len(sentences.stores[0])))
    assert seen[0].tolist() != seen[1].tolist()
    other = len(sentences.task_batches(sentences.tasks[1], 100, None))
    ends = [step.after.epoch for step in updates]
    assert ends == [min((n + 1) // size, (n + 1) // other) for n in range(2 * size)]


def test_updates_go_on_where_they_stopped(texts: Texts) -> None:
    sentences = sentences_of(texts, denoising="1", backtranslation="0:0,30:0,31:1")
    whole = list(islice(steps(sentences, **OPTIONS, start=Place()), 60))
    for stop in (1, 29, 30, 41):
        rest = list(islice(steps(sentences, **OPTIONS, start=whole[stop - 1].after), 60 - stop))
        for before, after in zip(whole[stop:], rest, strict=True):
            assert before.after == after.after
            for own, other in zip(before.examples, after.examples, strict=True):
                assert own.tolist() == other.tolist()


# What is made of them


def test_denoising_goes_from_a_noised_sentence_to_itself(texts: Texts) -> None:
    _, module = module_of(texts)
    sentences = sentences_of(texts, denoising="1")
    made = batch_of(module, sentences, 1, 1, 0)
    targets = sentences.sentences(0, sentences.task_batches(Task("denoising", 0), 100, None)[0])
    assert made.batch.target is not None
    for row, target in zip(made.batch.target.tolist(), targets, strict=True):
        assert row[: len(target)] == target.tolist()
    assert made.batch.source_language is not None
    assert made.batch.target_language is not None
    assert set(made.batch.source_language.tolist() + made.batch.target_language.tolist()) == {0}
    assert made.batch.source.tolist() != made.batch.target.tolist()
    again, other = (batch_of(module, sentences, 1, number, 0) for number in (1, 2))
    assert torch.equal(made.batch.source, again.batch.source)
    assert made.batch.source.tolist() != other.batch.source.tolist()


def test_back_translation_is_the_greedy_translation_of_that_moment(texts: Texts) -> None:
    setup, module = module_of(texts)
    sentences = sentences_of(texts, backtranslation="1")
    made = batch_of(module, sentences, 1, 1, 0)
    tokenizer = texts.data.tokenizers()[0]
    targets = sentences.sentences(
        0, sentences.locate(sentences.task_batches(Task("backtranslation", 0), 100, None)[0])[1]
    )
    translators = both_ways(module.translator.translators[0].members[0], CPU)
    lines = [SourceLine(tokenizer.decode(ids.tolist())) for ids in targets]
    wanted = [own.text for own in translators[0].translate(lines, module.translator.search)]
    module.train()
    found = [tokenizer.decode([i for i in row if i > 3]) for row in made.batch.source.tolist()]
    assert found == wanted
    assert made.batch.source_language is not None
    assert made.batch.target_language is not None
    assert set(made.batch.source_language.tolist()) == {1}
    assert set(made.batch.target_language.tolist()) == {0}
    assert setup.trainer.module.model.training


def test_back_translation_gives_no_gradient_to_the_translator(texts: Texts) -> None:
    _, module = module_of(texts)
    made = batch_of(module, sentences_of(texts, backtranslation="1"), 1, 1, 0)
    assert not made.batch.source.requires_grad
    total, _ = module(made)
    total.backward()
    assert any(p.grad is not None for p in module.model.parameters())


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
    (teacher,) = {own.members[0].model for own in module.translator.translators}
    assert teacher is not module.model
    updates = setup.steps(setup.train, **OPTIONS, start=Place())
    for number in (1, 2):
        setup.trainer.update(setup.train, next(updates), number)
        assert setup.trainer.average is not None
        for name, parameter in teacher.named_parameters():
            assert torch.equal(parameter, setup.trainer.average[name]), name
            assert not parameter.requires_grad
    assert teacher.output.weight is teacher.decoder.embed.tokens.weight
    assert averaged(module.model, setup.trainer).output.weight is not teacher.output.weight


def test_a_sentence_alone_has_no_language(texts: Texts) -> None:
    batch = collate([sentences_of(texts, mass="1")[0]])
    assert batch.source_language is None


def test_few_tokens_are_warned_of(texts: Texts, caplog: pytest.LogCaptureFixture) -> None:
    module_of(texts, train={"batch_tokens": 20})
    assert "an update has about" in caplog.text
    assert "unsupervised training needs 1,000 or more" in caplog.text
