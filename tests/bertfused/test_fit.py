import re
from pathlib import Path

import numpy as np
import pytest
import torch

import bertfused.fit
from bertfused.checkpoint import load_card, load_model, model_tensors, write_card
from bertfused.config import Recipe
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.fit import build_trainer, examples, set_up
from bertfused.prepare import prepare
from bertfused.subwords import Tokenizer, Words
from bertfused.vocab import Vocabulary
from tests.tiny_run import TINY, make_run


def recipe(**model: object) -> Recipe:
    files = {"source": "a", "target": "b"}
    return Recipe.model_validate(
        {
            "data": {"source": "en", "target": "de", "train": [files], "dev": files},
            "model": {**TINY, **model},
            "train": {"max_steps": 1},
        }
    )


def data_of(path: Path, *, first: str = "w0", swapped: bool = False) -> DataFolder:
    """A DATA folder without any text, for both sides of which w0 ... w35 are symbols."""
    words = [first, *(f"w{number}" for number in range(1, 36))]
    if swapped:
        words[:2] = words[1::-1]
    path.mkdir()
    for language in ("en", "de"):
        Tokenizer(Words(), Vocabulary(words, range(36, 0, -1))).save(path, language)
    return DataFolder(path, ("en", "de"), None, {})


def test_a_warm_start_takes_the_weights(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    trainer, _, start = build_trainer(recipe(), data_of(tmp_path / "data"), tmp_path / "run")
    assert start is not None
    assert start.fresh == ()
    theirs = model_tensors(load_model(tmp_path / "run").model)
    for name, tensor in model_tensors(trainer.module.model).items():
        assert torch.equal(tensor, theirs[name])


@pytest.mark.parametrize("change", [{"first": "other"}, {"swapped": True}])
def test_a_model_of_another_dictionary_of_the_same_size_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """Its embeddings would be loaded without a word, each for another symbol."""
    make_run(tmp_path / "run")
    data = data_of(tmp_path / "data", **change)
    with pytest.raises(UserError) as caught:
        build_trainer(recipe(), data, tmp_path / "run")
    assert str(caught.value) == (
        f"cannot start from {tmp_path / 'run'}: its dict.en.txt is not that of {data.path}; "
        f"prepare the data with subwords.reuse = '{tmp_path / 'run' / 'model'}'"
    )


def test_a_context_aware_model_is_no_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run)
    card = load_card(run / "model")
    write_card(run / "model", card.model_copy(update={"context": {"model": "zhang"}}))
    message = f"cannot start from {run}, which is a context-aware model; name a sentence-level RUN"
    with pytest.raises(UserError, match=re.escape(message)):
        set_up(recipe(), data_of(tmp_path / "data"), run, torch.device("cpu"))


def test_what_does_not_fit_together_is_the_users_to_mend(tmp_path: Path) -> None:
    _, card, _ = build_trainer(recipe(), data_of(tmp_path / "data"))
    message = "share_embeddings = 'all' needs one vocabulary, but the source has 40 entries and"
    with pytest.raises(UserError, match=re.escape(message)):
        card.model_copy(update={"target_size": 30}).build()


def test_equal_seeds_build_equal_models(tmp_path: Path) -> None:
    data = data_of(tmp_path / "data")
    first, second = (build_trainer(recipe(), data)[0] for _ in range(2))
    theirs = model_tensors(second.module.model)
    for name, tensor in model_tensors(first.module.model).items():
        assert torch.equal(tensor, theirs[name])


def test_a_corpus_is_passed_through_by_its_weight(tmp_path: Path) -> None:
    """In the recipe of the training: the same DATA serves for any weights."""
    (tmp_path / "a").write_text("a\nb\nc\nd\n")
    (tmp_path / "b").write_text("x\n\ny\nz\n")
    files = {"source": tmp_path / "a", "target": tmp_path / "b"}
    own = recipe().model_dump(exclude_unset=True)
    own["data"] |= {"train": [files, {**files, "weight": 2.5}], "dev": files}
    weighed = Recipe.model_validate({**own, "subwords": {"kind": "words", "tags": ["<BT>"]}})
    prepare(weighed, tmp_path / "data")
    data = DataFolder.open(tmp_path / "data")
    training = set_up(weighed, data, None, torch.device("cpu")).train
    numbers = np.concatenate(training.batches(100, np.random.default_rng(1))).tolist()
    assert [numbers.count(i) for i in range(3)] == [1, 1, 1]
    assert sum(numbers.count(i) for i in range(3, 6)) == 8  # 7.5, rounded to even
    assert len(np.concatenate(training.batches(100))) == 6
    with pytest.raises(UserError, match=r"weights to 3 corpora, but .* how large each is of 2"):
        examples(data, "train", None, [1.0, 2.0, 3.0])


def test_another_start_is_another_hash(tmp_path: Path) -> None:
    """Or a run would go on from what it did not begin with; a hub has no file to be hashed."""
    make_run(tmp_path / "first")
    make_run(tmp_path / "second", encoder_layers=3)
    starts = [tmp_path / "first", tmp_path / "second", Path("lab/xlm"), Path("lab/other")]
    assert len({*map(bertfused.fit._weights_sha256, starts)}) == 4
