import doctest
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertfused import translate as module
from bertfused.checkpoint import load_card, load_model, write_card
from bertfused.config import SearchConfig
from bertfused.errors import UserError
from bertfused.subwords import Tokenizer, Words
from bertfused.translate import (
    Member,
    SourceLine,
    Translation,
    Translator,
    choose_device,
    split_text,
)
from bertfused.vocab import Vocabulary
from tests.tiny_encoders import make_encoder, make_fused_run
from tests.tiny_run import make_run

SEARCH = SearchConfig(beam_size=3, max_length_a=0.5, max_length_b=2)
SAMPLING = SEARCH.model_copy(update={"sampling": "full", "seed": 5})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of equal vocabularies: plain, fused with one encoder, fused with another."""
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "plain")
    make_fused_run(root / "fused", make_encoder("bert", root / "bert"))
    for name in ("plain", "fused"):
        card = load_card(root / name / "model")
        limited = card.model.model_copy(update={"max_positions": 30})
        write_card(root / name / "model", card.model_copy(update={"model": limited}))
    make_fused_run(
        root / "other", make_encoder("roberta", root / "roberta"), order="bert-first", layer=1
    )
    return root


@pytest.fixture(scope="module")
def plain(runs: Path) -> Translator:
    return Translator.load(runs / "plain", device="cpu")


@pytest.fixture(scope="module")
def fused(runs: Path) -> Translator:
    return Translator.load(runs / "fused", device="cpu")


@pytest.fixture(params=["plain", "fused"])
def any_translator(request: pytest.FixtureRequest) -> Translator:
    translator = request.getfixturevalue(request.param)
    assert isinstance(translator, Translator)
    translator.counts.clear()
    return translator


def lines(number: int, seed: int = 1) -> list[SourceLine]:
    """Lines of several lengths of known and unknown words, a third of them with a context."""
    source = random.Random(seed)

    def sentence() -> str:
        return " ".join(f"w{source.randrange(40)}" for _ in range(source.randint(1, 6)))

    return [SourceLine(sentence(), (sentence(),) if i % 3 else ()) for i in range(number)]


def texts(found: Sequence[Translation]) -> list[str]:
    return [translation.text for translation in found]


def assert_alike(found: Sequence[Translation], expected: Sequence[Translation]) -> None:
    """The same strings, and scores within 1e-4."""
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        assert own.source == other.source
        assert [h.text for h in own.hypotheses] == [h.text for h in other.hypotheses]
        assert [h.tokens for h in own.hypotheses] == [h.tokens for h in other.hypotheses]
        for first, second in zip(own.hypotheses, other.hypotheses, strict=True):
            assert first.score == pytest.approx(second.score, abs=1e-4)
            assert first.log_prob == pytest.approx(second.log_prob, abs=1e-4)


def test_examples_in_the_documentation() -> None:
    assert doctest.testmod(module).failed == 0


# The same text for a line in any batch and any order


def test_batches_of_any_size_and_order_give_the_same(any_translator: Translator) -> None:
    """Batches of about 7, one line a batch, and all 64; forwards and shuffled."""
    given = lines(64)
    expected = list(any_translator.translate(given, SEARCH, batch_tokens=40))
    assert len({own.hypotheses[0].score for own in expected}) > 50
    order = list(range(64))
    for batch_tokens in (1, 10_000):
        random.Random(batch_tokens).shuffle(order)
        shuffled = [given[i] for i in order]
        found = list(any_translator.translate(shuffled, SEARCH, batch_tokens=batch_tokens))
        assert_alike(found, [expected[i] for i in order])


def test_a_line_alone_is_translated_as_in_company(any_translator: Translator) -> None:
    given = lines(6)
    together = list(any_translator.translate(given, SEARCH, nbest=3))
    alone = [next(any_translator.translate([line], SEARCH, nbest=3)) for line in given]
    assert_alike(alone, together)


def test_only_a_window_is_read_ahead(plain: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples show that lines keep their numbers from window to window."""
    given = lines(12)
    expected = list(plain.translate(given, SAMPLING))
    monkeypatch.setattr(module, "_WINDOW", 5)
    read: list[SourceLine] = []

    def reading() -> Iterator[SourceLine]:
        for line in given:
            read.append(line)
            yield line

    found = plain.translate(reading(), SAMPLING)
    first = next(found)
    assert len(read) == 5
    assert_alike([first, *found], expected)
    with pytest.raises(UserError, match=r"^line 7 has more than"):
        list(plain.translate([*["w1"] * 6, LONG], SEARCH, long="error"))


def test_the_models_own_settings_are_the_default(runs: Path, tmp_path: Path) -> None:
    translator = Translator.load(runs / "plain", device="cpu")
    assert translator.search == SearchConfig()
    member = translator.members[0]
    member.card = member.card.model_copy(update={"search": SEARCH})
    assert_alike(list(translator.translate(lines(3))), list(translator.translate(lines(3), SEARCH)))


def test_context_matters_to_a_fused_model_only(plain: Translator, fused: Translator) -> None:
    given = [SourceLine("w1 w2 w3", ("w4 w5",)), SourceLine("w1 w2 w3", ("w6 w7",))]
    first, second = plain.translate(given, SEARCH)
    assert first == second
    first, second = fused.translate(given, SEARCH)
    assert first.hypotheses[0].score != second.hypotheses[0].score


# Blank and odd lines


@pytest.mark.parametrize("text", ["", "   ", "\t \u3000"])
def test_a_blank_line_is_empty_and_the_model_not_asked(
    any_translator: Translator, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(any_translator, "_batch", None)
    found = list(any_translator.translate([text, SourceLine(text, ("w1",))], SEARCH, nbest=2))
    assert [own.source for own in found] == [text] * 2
    for translation in found:
        assert translation.text == ""
        assert [own.tokens for own in translation.hypotheses] == [(), ()]
        assert [own.score for own in translation.hypotheses] == [0, 0]


def test_blank_lines_keep_their_places(any_translator: Translator) -> None:
    given = ["", "w1 w2", " ", "w3", "w4 w5 w6", ""]
    found = list(any_translator.translate(given, SEARCH))
    assert [own.source for own in found] == given
    assert [bool(own.tokens) for t in found for own in t.hypotheses] == [0, 1, 0, 1, 1, 0]
    sentences = [line for line in given if line.strip()]
    expected = list(any_translator.translate(sentences, SEARCH))
    assert_alike([own for own in found if own.source.strip()], expected)


def test_no_lines_give_no_translations(plain: Translator) -> None:
    assert list(plain.translate([], SEARCH)) == []


def test_lines_of_unknown_words_are_translated(plain: Translator) -> None:
    assert len(list(plain.translate(["\U0001f600 </s> <pad> http://x.org"], SEARCH))) == 1


# Long lines; the models have positions for 29 tokens and EOS

LONG = " ".join(f"w{i % 30}" for i in range(70))


def test_a_long_line_is_split_and_joined_again(plain: Translator) -> None:
    plain.counts.clear()
    given = ["w1 w2", LONG, "w3"]
    first, found, last = plain.translate(given, SEARCH, long="split")
    assert plain.counts["long lines"] == 1
    parts = split_text(LONG, lambda part: len(part.split()) <= 29)
    assert len(parts) == 4
    assert " ".join(parts) == LONG
    own = [translation.hypotheses[0] for translation in plain.translate(parts, SEARCH)]
    assert found.source == LONG
    (joined,) = found.hypotheses
    assert joined.text == " ".join(part.text for part in own)
    assert joined.tokens == tuple(token for part in own for token in part.tokens)
    assert joined.log_prob == pytest.approx(sum(part.log_prob for part in own), abs=1e-4)
    assert len(joined.token_log_probs) == len(joined.tokens) + 4  # an EOS for each part
    assert joined.score == pytest.approx(joined.log_prob / len(joined.token_log_probs))
    for options, power in (({"length_penalty": 0.5}, 0.5), ({"normalize": False}, 0)):
        (found,) = plain.translate([LONG], SEARCH.model_copy(update=options), long="split")
        (joined,) = found.hypotheses
        length = len(joined.token_log_probs)
        assert joined.score == pytest.approx(joined.log_prob / length**power)
    assert_alike([first, last], list(plain.translate(["w1 w2", "w3"], SEARCH)))


def test_n_best_parts_are_joined_by_rank(plain: Translator) -> None:
    (found,) = plain.translate([LONG], SEARCH, nbest=3)
    parts = split_text(LONG, lambda part: len(part.split()) <= 29)
    own = list(plain.translate(parts, SEARCH, nbest=3))
    assert [hypothesis.text for hypothesis in found.hypotheses] == [
        " ".join(part.hypotheses[rank].text for part in own) for rank in range(3)
    ]


def test_a_long_line_is_truncated(plain: Translator) -> None:
    plain.counts.clear()
    (found,) = plain.translate([LONG], SEARCH, long="truncate")
    assert plain.counts["long lines"] == 1
    beginning = split_text(LONG, lambda part: len(part.split()) <= 29)[0]
    (expected,) = plain.translate([beginning], SEARCH)
    assert found.source == LONG
    assert found.hypotheses == expected.hypotheses


def test_a_long_line_is_an_error(plain: Translator) -> None:
    plain.counts.clear()
    found = plain.translate(["w1", LONG], SEARCH, long="error", first_line=10)
    with pytest.raises(UserError) as caught:
        next(found)
    assert str(caught.value) == "line 12 has more than the 29 tokens the model can read"


def test_the_longest_line_that_fits_is_left_alone(plain: Translator) -> None:
    plain.counts.clear()
    for length, long_lines in ((29, 0), (30, 1)):
        list(plain.translate([" ".join(["w1"] * length)], SEARCH))
        assert plain.counts["long lines"] == long_lines


def test_a_context_goes_with_every_part_and_a_prefix_with_the_first(fused: Translator) -> None:
    line = SourceLine(" ".join(["w1"] * 40), ("w5 w6",), prefix="w7")
    short = SEARCH.model_copy(update={"max_length_a": 0.0})
    (found,) = fused.translate([line], short)
    half = " ".join(["w1"] * 20)
    parts = [SourceLine(half, line.context, prefix="w7"), SourceLine(half, line.context)]
    own = fused.translate(parts, short)
    assert found.text == " ".join(texts(list(own)))


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ("a b", 3, ["a b"]),
        ("aaa bbb", 4, ["aaa", "bbb"]),
        ("aaa bbb ccc ddd", 7, ["aaa bbb", "ccc ddd"]),
        ("a. b c d e f. g", 10, ["a. b c d", "e f. g"]),  # no full stop in the middle half
        ("aa bb! cc dd ee", 10, ["aa bb!", "cc dd ee"]),  # not at the middle, "aa bb! cc"
        ("abcdefgh", 4, ["abcd", "efgh"]),
        ("  a  b  ", 1, ["a", "b"]),
        ("a", 0, ["a"]),
    ],
)
def test_where_a_text_is_cut(text: str, size: int, expected: list[str]) -> None:
    assert split_text(text, lambda part: len(part) <= size) == expected


def test_a_split_loses_no_word() -> None:
    source = random.Random(3)
    for _ in range(50):
        words = ["x" * source.randint(1, 9) + source.choice(["", ".", "?"]) for _ in range(40)]
        parts = split_text(" ".join(words), lambda part: len(part) <= 30)
        assert " ".join(parts).split() == words
        assert all(len(part) <= 30 for part in parts)


def test_a_translation_that_never_ends_is_counted(plain: Translator) -> None:
    plain.counts.clear()
    search = SEARCH.model_copy(update={"max_length_a": 0.0, "max_length_b": 2, "min_length": 2})
    list(plain.translate(["w1 w2 w3", "w4"], search))
    assert plain.counts["translations ended by the maximum length"] == 2


def test_context_that_does_not_fit_is_counted(fused: Translator) -> None:
    fused.counts.clear()
    list(fused.translate([SourceLine("w1", ("w2 " * 30,)), SourceLine("w1")], SEARCH))
    # [CLS] w2 x 30 [SEP] w1 [SEP] in characters: 1 + 60 + 1 + 2 + 1 of the encoder's 24
    assert fused.counts["context wordpieces cut"] == 65 - 24


# N-best, prefixes, sampling


def test_hypotheses_are_ranked_and_their_numbers_hang_together(
    any_translator: Translator,
) -> None:
    for translation in any_translator.translate(lines(5), SEARCH, nbest=3):
        hypotheses = translation.hypotheses
        assert len({own.tokens for own in hypotheses}) == 3
        assert translation.text == hypotheses[0].text
        scores = [own.score for own in hypotheses]
        assert scores == sorted(scores, reverse=True)
        for own in hypotheses:
            assert own.text == " ".join(own.tokens).replace("<unk>", "\u2047")
            assert len(own.token_log_probs) == len(own.tokens) + 1
            assert own.log_prob == pytest.approx(math.fsum(own.token_log_probs))
            assert own.score == pytest.approx(own.log_prob / len(own.token_log_probs), abs=1e-5)


def test_the_best_of_one_is_the_first_of_many(any_translator: Translator) -> None:
    one = any_translator.translate(lines(5), SEARCH)
    many = any_translator.translate(lines(5), SEARCH, nbest=3)
    for single, several in zip(one, many, strict=True):
        assert single.hypotheses[0].tokens == several.hypotheses[0].tokens


def test_more_hypotheses_than_beams_are_refused(plain: Translator) -> None:
    message = "nbest is 4; beam_size 3 allows no more than that"
    with pytest.raises(UserError, match=message):
        list(plain.translate(["w1"], SEARCH, nbest=4))


def test_a_prefix_begins_the_translation(any_translator: Translator) -> None:
    given = [replace(line, prefix=f"w{i} w9" if i % 2 else None) for i, line in enumerate(lines(6))]
    found = list(any_translator.translate(given, SEARCH))
    for i, translation in enumerate(found):
        if i % 2:
            assert translation.hypotheses[0].tokens[:2] == (f"w{i}", "w9")
    free = [replace(line, prefix=None) for line in given]
    assert_alike(found[::2], list(any_translator.translate(free, SEARCH))[::2])


@pytest.mark.parametrize("sampling", ["full", "topk:5", "nucleus:0.8"])
def test_samples_depend_on_seed_and_line_number_only(
    any_translator: Translator, sampling: str
) -> None:
    given = lines(6)
    search = SAMPLING.model_copy(update={"sampling": sampling})
    expected = list(any_translator.translate(given, search, nbest=2))
    found = any_translator.translate(given, search, nbest=2, batch_tokens=1)
    assert_alike(list(found), expected)
    second_shard = any_translator.translate(given[3:], search, nbest=2, first_line=3)
    assert_alike(list(second_shard), expected[3:])
    other = any_translator.translate(given, search.model_copy(update={"seed": 6}), nbest=2)
    assert texts(list(other)) != texts(expected)


def test_equal_lines_get_samples_of_their_own(plain: Translator) -> None:
    found = texts(list(plain.translate(["w1 w2 w3"] * 8, SAMPLING)))
    assert len(set(found)) > 4


def test_parts_of_a_line_get_samples_of_their_own(plain: Translator) -> None:
    (found,) = plain.translate([" ".join(["w1"] * 58)], SAMPLING)
    half = len(found.hypotheses[0].tokens) // 2
    assert found.hypotheses[0].tokens[:half] != found.hypotheses[0].tokens[half : 2 * half]


# Ensembles


def test_an_ensemble_of_equals_is_the_model_itself(runs: Path, any_translator: Translator) -> None:
    name = "plain" if any_translator.members[0].encoder is None else "fused"
    pair = Translator.load(runs / name, ensemble=[runs / name], device="cpu")
    expected = list(any_translator.translate(lines(5), SEARCH, nbest=2))
    assert_alike(list(pair.translate(lines(5), SEARCH, nbest=2)), expected)
    warm = SAMPLING.model_copy(update={"temperature": 0.7})
    assert_alike(
        list(pair.translate(lines(5), warm)), list(any_translator.translate(lines(5), warm))
    )


def test_an_ensemble_averages_probabilities_of_models_with_different_encoders(runs: Path) -> None:
    """Step by step: log of the mean of what each member gives the same prefix."""
    names = ["plain", "fused", "other"]
    loaded = [Member.of(load_model(runs / name)) for name in names]
    ensemble = Translator(loaded, torch.device("cpu"))
    (line,) = lines(1, seed=7)
    (found,) = ensemble.translate([line], SEARCH)
    best = found.hypotheses[0]
    ids = [ensemble.members[0].target.vocabulary.id_of(token) for token in best.tokens]
    probabilities = []
    for member in loaded:
        (example,) = member.examples([line], ensemble.counts)
        batch = member.batch([replace(example, target=[*ids, 2])], torch.device("cpu"))
        with torch.no_grad():
            own = member.model(batch)[0].softmax(-1)
        probabilities.append(own[range(len(ids) + 1), [*ids, 2]])
    expected = torch.stack(probabilities).mean(0).log()
    torch.testing.assert_close(torch.tensor(best.token_log_probs), expected, rtol=0, atol=1e-4)
    single = next(Translator([loaded[0]], torch.device("cpu")).translate([line], SEARCH))
    assert single.hypotheses[0].score != pytest.approx(best.score, abs=1e-3)


def test_an_ensemble_fits_the_shortest_member(runs: Path) -> None:
    """The plain model has 30 positions, the other one 1024."""
    pair = Translator.load(runs / "other", ensemble=[runs / "plain"], device="cpu")
    (found,) = pair.translate([LONG], SEARCH)
    assert pair.counts["long lines"] == 1
    assert found.source == LONG


def test_an_ensemble_has_one_target_vocabulary(runs: Path) -> None:
    members = [Member.of(load_model(runs / name)) for name in ("plain", "plain")]
    words = [f"x{i}" for i in range(36)]
    members[1].target = Tokenizer(Words(), Vocabulary(words, [1] * 36))
    with pytest.raises(UserError, match="the models of an ensemble must have one target voc"):
        Translator(members, torch.device("cpu"))


# Devices and precision


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("cuda")


@pytest.mark.parametrize("name", ["nothing", "cpu:x", "mps:99"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(UserError, match=f"^device '{name}' cannot be used here: .+"):
        choose_device(name)


def test_an_encoder_in_bfloat16_changes_scores_a_little(runs: Path, fused: Translator) -> None:
    low = Translator.load(runs / "fused", device="cpu", encoder_precision="bf16")
    encoder = low.members[0].encoder
    assert encoder is not None
    assert next(encoder.parameters()).dtype == torch.bfloat16
    assert next(low.members[0].model.parameters()).dtype == torch.float32
    found = next(low.translate(["w1 w2"], SEARCH)).hypotheses[0].score
    exact = next(fused.translate(["w1 w2"], SEARCH)).hypotheses[0].score
    assert found != exact
    assert found == pytest.approx(exact, abs=0.05)


def test_the_encoder_may_be_found_elsewhere(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fused", tmp_path / "run")
    card = load_card(tmp_path / "run" / "model")
    assert card.encoder is not None
    gone = card.encoder.model_copy(update={"name": str(tmp_path / "gone")})
    write_card(tmp_path / "run" / "model", card.model_copy(update={"encoder": gone}))
    with pytest.raises(UserError, match="cannot load the model of encoder"):
        Translator.load(tmp_path / "run")
    translator = Translator.load(tmp_path / "run", encoder=str(runs / "bert"), device="cpu")
    assert len(list(translator.translate(["w1"], SEARCH))) == 1


def test_tags_are_never_in_a_translation(runs: Path) -> None:
    translator = Translator.load(runs / "plain", device="cpu")
    (first,) = translator.translate(["w1 w2 w3"])
    produced = set(first.hypotheses[0].tokens)
    assert produced
    target = translator.members[0].target
    counts = [-1 if symbol in produced else 1 for symbol in target.vocabulary.symbols[4:]]
    tagged = Vocabulary(target.vocabulary.symbols[4:], counts)
    translator.members[0].target = Tokenizer(Words(), tagged)
    (second,) = translator.translate(["w1 w2 w3"], nbest=3)
    assert not produced & {token for found in second.hypotheses for token in found.tokens}
