import json
import math
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bertfused.checkpoint import load_model
from bertfused.config import Recipe, TextConfig
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.fit import train_run
from bertfused.prepare import prepare
from bertfused.run import RunFolder
from bertfused.training import Place, TrainState, Update
from bertfused.translate import SourceLine, Translator
from tests.tiny_run import TINY
from tests.tiny_xlm import MODEL
from unsup.config import PretrainConfig, PretrainRecipe
from unsup.pretrain import (
    MaskedBatch,
    MaskedLoss,
    MonolingualText,
    hide_tokens,
    language_weights,
    masked_steps,
    set_up,
)

LINES = {"en": 60, "fr": 30}
SUBWORDS = {"kind": "words", "tags": ["<mask>"]}
CPU = torch.device("cpu")


def pretrain(recipe: PretrainRecipe, data: DataFolder, out: Path, **options: Any) -> None:
    train_run(recipe, data, out, lambda: (), set_up=set_up, **options)


class MonoConfig(TextConfig):
    mono: dict[str, tuple[Path, ...]]

    @property
    def monolingual(self) -> Mapping[str, tuple[Path, ...]]:
        return self.mono


class MonoRecipe(PretrainRecipe):
    data: MonoConfig


def recipe_of(texts: Path, **sections: dict[str, object]) -> MonoRecipe:
    values: dict[str, Any] = {
        "data": {
            "source": "en",
            "target": "fr",
            "mono": {language: [texts / language] for language in LINES},
        },
        "subwords": SUBWORDS,
        "model": {**MODEL, "dropout": 0.1, "attention_dropout": 0.1},
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "train": {
            "batch_tokens": 60,
            "accumulate": 2,
            "max_steps": 9,
            "validate_every": 4,
            "log_every": 3,
            "precision": "fp32",
        },
        "pretrain": {"valid_lines": 5},
    }
    for name, section in sections.items():
        values[name] = values[name] | section
    return MonoRecipe.model_validate(values)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of words a, b, c in English and x, y, z in French."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(1)
    for language, words in (("en", "abcd"), ("fr", "wxyz")):
        lines = (
            " ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(LINES[language])
        )
        (folder / language).write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def data(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(recipe_of(texts), folder)
    return DataFolder.open(folder)


@pytest.fixture(scope="module")
def run(texts: Path, data: DataFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "xlm"
    pretrain(recipe_of(texts), data, out)
    return out


def text_of(data: DataFolder, *parts: tuple[int, str, range], **options: Any) -> MonolingualText:
    return MonolingualText([(n, data.mono(name), rows) for n, name, rows in parts], 0.15, **options)


def module_of(texts: Path, data: DataFolder) -> tuple[MaskedLoss, MonolingualText]:
    setup = set_up(recipe_of(texts), data, None, CPU)
    assert isinstance(setup.trainer.module, MaskedLoss)
    assert isinstance(setup.train, MonolingualText)
    return setup.trainer.module, setup.train


# Masks


def test_of_the_predicted_tokens_most_are_masked_some_random_and_some_kept() -> None:
    ids = np.random.default_rng(1).integers(4, 1000, (400, 252))
    ids[:, [0, -1]] = 2
    ids[200:, 200:] = 1
    ids[0, 1:100] = 3
    number, symbols = 12_000, np.arange(4, 1000)
    hidden, places = hide_tokens(
        ids, number, mask=1000, symbols=symbols, generator=np.random.default_rng(2)
    )
    assert len(places) == len(set(places.tolist())) == number
    assert ids.flat[places].min() >= 3  # no special symbol but the unknown
    elsewhere = np.setdiff1d(np.arange(ids.size), places)
    assert (hidden.flat[elsewhere] == ids.flat[elsewhere]).all()
    found, was = hidden.flat[places], ids.flat[places]
    is_mask, is_kept = found == 1000, found == was
    assert np.isin(found[~is_mask & ~is_kept], symbols).all()
    spread = math.sqrt(0.1 * 0.9 / number)
    assert abs(is_mask.mean() - 0.8) < 4 * math.sqrt(0.8 * 0.2 / number)
    assert abs(is_kept.mean() - 0.1001) < 4 * spread  # a random one may be the same
    assert abs((~is_mask & ~is_kept).mean() - 0.0999) < 4 * spread


def test_a_batch_is_a_function_of_seed_step_and_micro_batch(texts: Path, data: DataFolder) -> None:
    module, text = module_of(texts, data)

    def collated(*key: int) -> MaskedBatch:
        module.begin_step(*key, drop_net=0.0)
        return module.collate(text, np.arange(20))

    first, again = collated(1, 7, 0), collated(1, 7, 0)
    assert torch.equal(first.input, again.input)
    assert torch.equal(first.places, again.places)
    for other in (collated(2, 7, 0), collated(1, 8, 0), collated(1, 7, 1)):
        assert not torch.equal(first.input, other.input)
        assert len(other.places) == len(first.places) == text.num_predicted(np.arange(20))
        assert other.positions == first.positions


def test_dropout_is_a_function_of_the_key_too(texts: Path, data: DataFolder) -> None:
    module, text = module_of(texts, data)
    losses = []
    for key in ((1, 7, 0), (1, 8, 0), (1, 7, 0)):
        module.begin_step(1, 1, 0, drop_net=0.0)
        batch = module.collate(text, np.arange(9))
        module.begin_step(*key, drop_net=0.0)
        losses.append(float(module.train().loss(batch).total.detach()))
    assert losses[0] == losses[2] != losses[1]


def test_the_loss_is_that_of_transformers(texts: Path, data: DataFolder) -> None:
    module, text = module_of(texts, data)
    module.eval()
    module.begin_step(1, 1, 0, drop_net=0.0)
    batch = module.collate(text, np.array([0, 1, 2, 60, 61]))
    assert batch.language.tolist() == [0, 0, 0, 1, 1]
    labels = torch.full_like(batch.input, -100)
    labels.view(-1)[batch.places] = batch.target
    output = module.model(
        input_ids=batch.input,
        attention_mask=batch.mask.long(),
        langs=batch.language[:, None].expand_as(batch.input),
        labels=labels,
    )
    loss = module.loss(batch)
    assert loss.tokens == len(batch.target)
    torch.testing.assert_close(loss.total / loss.tokens, output.loss)


# Data


def test_sentences_stand_between_ends(data: DataFolder) -> None:
    text = text_of(data, (0, "en", range(3)), (1, "fr", range(10, 12)))
    assert len(text) == 5
    stores = [data.mono(name) for name in LINES]
    for i, (language, row) in enumerate([(0, 0), (0, 1), (0, 2), (1, 10), (1, 11)]):
        example = text[i]
        assert list(example.source) == [2, *stores[language][row]]
        assert example.source[-1] == 2
        assert example.languages == (language, language)
        assert len(example.source) == text.lengths[0][i]


def test_the_last_lines_are_held_out(texts: Path, data: DataFolder) -> None:
    setup = set_up(recipe_of(texts), data, None, CPU)
    assert len(setup.train) == 55 + 25
    held_out = setup.validator.by_language  # type: ignore[attr-defined]
    for number, (language, text) in enumerate(held_out.items()):
        assert len(text) == 5
        assert list(text[0].source[1:]) == list(data.mono(language)[LINES[language] - 5])
        assert text[0].languages == (number, number)


def test_small_languages_are_drawn_more_often() -> None:
    assert language_weights([300, 100], 1.0) == pytest.approx([1, 1])
    big, small = language_weights([8000, 1000], 0.7)
    assert 8000 * big + 1000 * small == pytest.approx(9000)
    assert 8000 * big / (1000 * small) == pytest.approx(8**0.7)


def test_an_epoch_draws_by_the_weights(data: DataFolder) -> None:
    parts = ((0, "en", range(60)), (1, "fr", range(30)))
    text = text_of(data, *parts, weights=language_weights([60, 30], 0.0))
    numbers = np.concatenate(text.batches(60, np.random.default_rng(1)))
    assert [int((numbers < 60).sum()), int((numbers >= 60).sum())] == [45, 45]
    assert sorted(np.concatenate(text.batches(60))) == list(range(90))


def test_a_step_counts_the_predicted_tokens(texts: Path, data: DataFolder) -> None:
    module, text = module_of(texts, data)
    updates = masked_steps(text, batch_tokens=60, accumulate=2, seed=1, start=Place())
    step = next(updates)
    assert len(step.examples) == 2
    module.begin_step(1, 1, 0, drop_net=0.0)
    batches = [module.collate(text, numbers) for numbers in step.examples]
    assert step.target_tokens == sum(len(batch.target) for batch in batches)
    assert text.num_predicted(np.array([int(text.lengths[0].argmin())])) == 1


# The run


class Killed(Exception):
    pass


def dies_after(last: int) -> Callable[[TrainState, Update], None]:
    def on_update(state: TrainState, update: Update) -> None:
        if state.step == last:
            raise Killed

    return on_update


def contents(run: Path) -> dict[str, object]:
    """All that a run left, without clocks."""
    found: dict[str, object] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.is_file() and path.suffix in (".safetensors", ".txt", ".json"):
            found[name] = path.read_bytes()
    for name in [name for name in found if name in ("log.txt", "run.json") or "training.j" in name]:
        del found[name]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("seconds", None)
        record.pop("tokens_per_second", None)
    return found | {"metrics": records}


@pytest.mark.parametrize("last", [2, 6])
def test_a_run_that_was_killed_ends_as_if_nothing_had_happened(
    texts: Path, data: DataFolder, run: Path, tmp_path: Path, last: int
) -> None:
    recipe, out = recipe_of(texts), tmp_path / "killed"
    with pytest.raises(Killed):
        pretrain(recipe, data, out, on_update=dies_after(last))
    pretrain(recipe, data, out, resume=True)
    assert contents(out) == contents(run)


def test_a_run_leaves_what_every_run_does(run: Path, data: DataFolder) -> None:
    assert list(RunFolder(run).checkpoints()) == [8, 9]
    report = (run / "report.md").read_text()
    assert "parameters trained, 0 frozen, a masked language model (XLM)" in report
    assert "chosen by the mean log-perplexity of masked tokens over the languages" in report
    assert "| step | nll | perplexity | perplexity en | perplexity fr |" in report
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    valid = [record for record in records if "valid_nll" in record]
    assert [record["step"] for record in valid] == [4, 8, 9]
    for record in valid:
        assert record["valid_value"] == -record["valid_nll"]
        mean = record["valid_perplexity_en"] * record["valid_perplexity_fr"]
        assert record["valid_perplexity"] ** 2 == pytest.approx(mean)
    names = {path.name for path in (run / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "dict.en.txt", "dict.fr.txt"}
    dictionary = (run / "model" / "dict.en.txt").read_bytes()
    assert dictionary == (data.path / "dict.en.txt").read_bytes()


def test_transformers_loads_the_model(texts: Path, data: DataFolder, tmp_path: Path) -> None:
    setup = set_up(recipe_of(texts), data, None, CPU)
    module, text = module_of(texts, data)
    setup.card.save(tmp_path / "model", module.model, None, data.path)
    module.eval().begin_step(1, 1, 0, drop_net=0.0)
    batch = module.collate(text, np.arange(50, 60))
    inputs = {
        "input_ids": batch.input,
        "attention_mask": batch.mask.long(),
        "langs": batch.language[:, None].expand_as(batch.input),
    }
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    whole = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()
    assert (whole.config.model_type, whole.config.lang2id) == ("xlm", {"en": 0, "fr": 1})
    assert torch.equal(whole(**inputs).logits, module.model(**inputs).logits)
    encoder = transformers.AutoModel.from_pretrained(tmp_path / "model").eval()
    states = module.model.transformer(**inputs).last_hidden_state
    assert torch.equal(encoder(**inputs).last_hidden_state, states)


def test_what_is_trained_is_learned(texts: Path, data: DataFolder, tmp_path: Path) -> None:
    """Each language has four words: who knows neither language nor words is at 8 or above."""
    recipe = recipe_of(
        texts,
        train={"max_steps": 200, "validate_every": 200, "batch_tokens": 400},
        optim={"lr": 5e-3},
        model={"dropout": 0.0, "attention_dropout": 0.0},
    )
    pretrain(recipe, data, tmp_path / "run")
    *_, last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["valid_perplexity"] < 6


# What does not fit


def test_messages(texts: Path, data: DataFolder, tmp_path: Path) -> None:
    for recipe, message in (
        (
            recipe_of(texts, model={"ffn_dim": 16}),
            "model.ffn_dim is 16, but XLM's is always 4 * model_dim, 32 here",
        ),
        (
            recipe_of(texts, pretrain={"valid_lines": 30}),
            f"{data.path} has 30 lines of 'fr', of which the last 30 (pretrain.valid_lines) are "
            "held out",
        ),
        (
            recipe_of(texts, model={"max_positions": 9}),
            f"a sentence of 'en' in {data.path} takes 11 positions, but model.max_positions is 9",
        ),
    ):
        with pytest.raises(UserError) as caught:
            pretrain(recipe, data, tmp_path / "run")
        assert str(caught.value) == message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("subwords", "message"),
    [
        ({"shared": False}, "has a dictionary for each language, but an XLM has one"),
        ({"tags": []}, "has no symbol for masked tokens; prepare it with subwords.tags = "),
    ],
)
def test_a_dictionary_that_does_not_do(
    texts: Path, tmp_path: Path, subwords: dict[str, object], message: str
) -> None:
    recipe = recipe_of(texts, subwords=subwords)
    prepare(recipe, tmp_path / "data")
    with pytest.raises(UserError, match=re.escape(message)):
        pretrain(recipe, DataFolder.open(tmp_path / "data"), tmp_path / "run")


def test_the_defaults_are_those_of_xlm() -> None:
    assert PretrainConfig() == PretrainConfig(mask_rate=0.15, language_smoothing=0.7)


# As a frozen encoder


def test_an_nmt_is_fused_with_it(run: Path, texts: Path, data: DataFolder, tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    shutil.copy(texts / "fr", source)
    lines = (texts / "en").read_text().splitlines(keepends=True)
    target.write_text("".join(lines[: LINES["fr"]]))
    files = {"source": source, "target": target}
    recipe = Recipe.model_validate(
        {
            "data": {"source": "fr", "target": "en", "train": [files], "dev": files},
            "subwords": {"kind": "words", "reuse": run / "model"},
            "model": TINY,
            "fusion": {"encoder": str(run)},
            "train": {"max_steps": 3, "validate_bleu": False},
        }
    )
    prepare(recipe, tmp_path / "data")
    prepared = DataFolder.open(tmp_path / "data")
    training = prepared.split("train")
    assert training.bert is not None
    for own, bert in zip(training.source, training.bert, strict=True):
        assert bert.tolist() == [2, *own]
    train_run(recipe, prepared, tmp_path / "fused", lambda: [])
    encoder = load_model(tmp_path / "fused").load_encoder()
    assert encoder is not None
    assert encoder.language_ids is not None
    assert encoder.language_ids.tolist() == [1]
    (translation,) = Translator.load(tmp_path / "fused").translate([SourceLine("x y z")])
    assert translation.source == "x y z"
