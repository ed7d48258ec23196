import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bertfused.config import SearchConfig
from bertfused.errors import UserError
from bertfused.translate import SourceLine, Translation, Translator
from docnmt import DocumentTranslator
from docnmt.documents import DocumentLine, SeparatorLine
from docnmt.on_base import ContextSystem
from docnmt.sequential import DocumentLineTranslator, Sentence
from docnmt.translate import (
    as_read,
    in_context,
    in_reference_context,
    load,
    reads_context,
    score,
    score_documents,
)
from tests.tiny_context import CONCATENATED, ON_A_BASE, make_context_run
from tests.tiny_encoders import make_encoder, make_fused_run

SEARCH = SearchConfig(beam_size=2, max_length_a=1.0, max_length_b=1)
# One-sentence documents, a blank sentence inside of one, equal sentences in different contexts
DOCUMENTS = [
    ["w1 w2 w3", "w4", "w5 w6 w7", "w4", "w9 unknown"],
    ["w11"],
    ["w4", "", "w12 w13 w14 w15"],
]
KINDS = ["layerwise", "source only", "target only", "cadec", "zhang", *CONCATENATED]
FUSED = ["layerwise, fused", "cadec, fused", "zhang, fused"]
# One of each way to read context
SOME = ["layerwise, fused", "zhang", "2-to-2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run of every kind; BERT reads one sentence before the current one in fused ones."""
    root = tmp_path_factory.mktemp("runs")
    encoder = make_encoder("bert", root / "bert")
    for name in KINDS:
        options = (ON_A_BASE | CONCATENATED)[name]
        make_context_run(root / name, options, encoder_layers=1, decoder_layers=1)
    for name in FUSED:
        fusion = {"mask_special": name != "zhang, fused"}
        options = ON_A_BASE[name.removesuffix(", fused")] | {"layers": 1}
        make_context_run(root / name, options, encoder=encoder, fusion=fusion, previous=1)
    return root


_loaded: dict[Path, DocumentLineTranslator] = {}


def load_once(run: Path) -> DocumentLineTranslator:
    if run not in _loaded:
        found = load(run, device="cpu")
        assert isinstance(found, DocumentLineTranslator)
        _loaded[run] = found
    return _loaded[run]


@pytest.fixture(params=[*KINDS, *FUSED])
def translator(request: pytest.FixtureRequest, runs: Path) -> DocumentLineTranslator:
    return load_once(runs / request.param)


@pytest.fixture(params=SOME)
def one(request: pytest.FixtureRequest, runs: Path) -> DocumentLineTranslator:
    return load_once(runs / request.param)


def lines_of(
    translator: DocumentLineTranslator, documents: Sequence[Sequence[str]]
) -> list[SourceLine]:
    """Make the lines of documents as the commands do."""
    lines = (
        DocumentLine(f"document {number}", text, None)
        for number, document in enumerate(documents)
        for text in document
    )
    found = in_context(lines, translator.documents)
    return [own for own in found if isinstance(own, SourceLine)]


def translate(
    translator: DocumentLineTranslator, documents: Sequence[Sequence[str]], **options: object
) -> list[Translation]:
    return list(translator.translate(lines_of(translator, documents), SEARCH, **options))


def assert_alike(found: Sequence[Translation], expected: Sequence[Translation]) -> None:
    assert [own.source for own in found] == [own.source for own in expected]
    for own, other in zip(found, expected, strict=True):
        assert [h.text for h in own.hypotheses] == [h.text for h in other.hypotheses]
        assert [h.tokens for h in own.hypotheses] == [h.tokens for h in other.hypotheses]
        for ours, theirs in zip(own.hypotheses, other.hypotheses, strict=True):
            assert ours.score == pytest.approx(theirs.score, abs=1e-4)
            assert ours.log_prob == pytest.approx(theirs.log_prob, abs=1e-4)


# Every line, whatever stands beside it


def test_each_line_has_its_translation_in_order(one: DocumentLineTranslator) -> None:
    found = translate(one, DOCUMENTS)
    texts = [text for document in DOCUMENTS for text in document]
    assert [own.source for own in found] == texts
    assert [bool(own.text) for own in found] == [bool(text) for text in texts]
    assert translate(one, []) == []


def test_batches_change_nothing(translator: DocumentLineTranslator) -> None:
    expected = translate(translator, DOCUMENTS)
    assert_alike(translate(translator, DOCUMENTS, batch_tokens=11), expected)


def test_a_document_crosses_the_window(
    one: DocumentLineTranslator, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = translate(one, DOCUMENTS)
    monkeypatch.setattr("docnmt.sequential._WINDOW", 2)
    assert_alike(translate(one, DOCUMENTS), expected)


def test_documents_side_by_side_are_what_they_are_alone(
    one: DocumentLineTranslator,
) -> None:
    alone = [own for document in DOCUMENTS for own in translate(one, [document])]
    assert_alike(translate(one, DOCUMENTS), alone)


def test_only_translations_are_counted_as_cut(translator: DocumentLineTranslator) -> None:
    """Not the drafts of a model that corrects some."""
    translator.counts.clear()
    found = translate(translator, DOCUMENTS)
    cut = [
        len(translation.hypotheses[0].tokens) >= len(translation.source.split()) + 2
        for translation in found
    ]
    assert translator.counts["translations ended by the maximum length"] == sum(cut) > 0


def test_a_blank_sentence_is_no_context(one: DocumentLineTranslator) -> None:
    found = translate(one, [["w1 w2", " ", "w3 w4", "", "", "w5"]])
    without = translate(one, [["w1 w2", "w3 w4", "w5"]])
    assert [own.text for own in found if not own.source.strip()] == [""] * 3
    assert_alike([own for own in found if own.source.strip()], without)


def test_a_later_sentence_changes_nothing_before_it(one: DocumentLineTranslator) -> None:
    document = ["w1 w2", "w4", "w5 w6 w7"]
    expected = translate(one, [document])
    for number in (1, 2):
        other = [*document[:number], *["w30 w31 w32"] * (len(document) - number)]
        assert_alike(translate(one, [other])[:number], expected[:number])


def test_an_earlier_sentence_matters_within_reach(one: DocumentLineTranslator) -> None:
    def last(*document: str) -> Translation:
        return translate(one, [document])[-1]

    near = [last(first, "w4 w5").hypotheses[0].log_prob for first in ("w1 w2", "w20")]
    assert near[0] != pytest.approx(near[1], abs=1e-3)
    if not one.system.reads_target:  # else earlier translations depend on still earlier ones
        fill = [f"w{number}" for number in range(6, 6 + one.system.sentences)]
        assert_alike([last("w1 w2", *fill, "w4")], [last("w20", *fill, "w4")])


def test_lines_without_a_document_have_no_context(one: DocumentLineTranslator) -> None:
    texts = [text for document in DOCUMENTS for text in document]
    lines = [replace(line, document=None) for line in lines_of(one, [[t] for t in texts])]
    found = list(one.translate(lines, SEARCH))
    assert_alike(found, translate(one, [[text] for text in texts]))


@pytest.mark.parametrize("name", [*KINDS, *FUSED])
def test_the_first_sentence_of_a_document_is_translated_by_the_base(runs: Path, name: str) -> None:
    translator = load_once(runs / name)
    found = translate(translator, DOCUMENTS, nbest=2)
    places = [0, 5, 6]
    base = Translator.load(runs / name / "base", device="cpu")
    context = ("",) if name in FUSED else ()
    lines = [SourceLine(document[0], context) for document in DOCUMENTS]
    expected = list(base.translate(lines, SEARCH, nbest=2))
    assert_alike([found[place] for place in places], expected)


# Options of the search


def test_nbest_are_ranked_and_the_first_is_the_best(one: DocumentLineTranslator) -> None:
    best, found = translate(one, DOCUMENTS), translate(one, DOCUMENTS, nbest=2)
    for own, both in zip(best, found, strict=True):
        assert len(both.hypotheses) == 2
        scores = [hypothesis.score for hypothesis in both.hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert own.text == both.text
        for hypothesis in both.hypotheses if own.source else ():
            length = len(hypothesis.token_log_probs)
            assert length == len(hypothesis.tokens) + 1
            assert math.fsum(hypothesis.token_log_probs) == pytest.approx(hypothesis.log_prob)
            assert hypothesis.score == pytest.approx(hypothesis.log_prob / length)


def test_a_sample_is_repeated_by_its_seed(one: DocumentLineTranslator) -> None:
    lines = lines_of(one, DOCUMENTS[1:])
    search = SEARCH.model_copy(update={"sampling": "full", "seed": 3})
    found = list(one.translate(lines, search))
    assert_alike(list(one.translate(lines, search, batch_tokens=1)), found)
    other = one.translate(lines, search.model_copy(update={"seed": 4}))
    assert [own.text for own in other] != [own.text for own in found]
    rest = list(one.translate(lines[1:], search, first_line=1))
    assert_alike(rest, found[1:])


def test_a_prefix_begins_a_translation_and_is_context(one: DocumentLineTranslator) -> None:
    lines = lines_of(one, [["w1 w2", "w3"]])
    free = list(one.translate(lines, SEARCH))
    found = {}
    for prefix in ("w30 w31", "w5"):
        begun = [replace(lines[0], prefix=prefix), lines[1]]
        found[prefix] = list(one.translate(begun, SEARCH))
        assert found[prefix][0].text.startswith(prefix)
    seconds = [own[1].hypotheses[0].log_prob for own in found.values()]
    if one.system.reads_target:
        assert seconds[0] != pytest.approx(seconds[1], abs=1e-3)
    else:
        assert seconds == pytest.approx([free[1].hypotheses[0].log_prob] * 2, abs=1e-4)
    later = [lines[0], replace(lines[1], prefix="w9")]
    assert list(one.translate(later, SEARCH))[1].text.startswith("w9")


# Lines that are too long

LONG = "w1 w2 w3 w4 w5. w6 w7 w8 w9 w10 w11 w12"


@pytest.fixture(scope="module", params=["zhang", "2-to-2"])
def short(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> DocumentLineTranslator:
    """Load a model that has positions for 9 tokens and EOS."""
    options = (ON_A_BASE | CONCATENATED)[request.param]
    run = make_context_run(
        tmp_path_factory.mktemp("short") / "run", options, max_positions=10, encoder_layers=1
    )
    return load_once(run)


@pytest.mark.parametrize("document", ["1", None])
def test_pieces_of_a_long_line_are_consecutive_sentences(
    short: DocumentLineTranslator, document: str | None
) -> None:
    texts = ["w20", f"{LONG} {LONG[::-1]}", "w21 w22"]
    lines = [SourceLine(text, document=document) for text in texts]
    before = short.counts["long lines"]
    found = list(short.translate(lines, SEARCH))
    assert short.counts["long lines"] == before + 1
    pieces = short.system.base.cut_to_fit(texts[1], "split", "")
    assert len(pieces) > 2
    apart = [SourceLine(text, document=document) for text in (texts[0], *pieces, texts[2])]
    expected = [own.hypotheses[0] for own in short.translate(apart, SEARCH)]
    assert [found[0].text, found[2].text] == [expected[0].text, expected[-1].text]
    assert found[1].text == " ".join(own.text for own in expected[1:-1])
    joined = math.fsum(own.log_prob for own in expected[1:-1])
    assert found[1].hypotheses[0].log_prob == pytest.approx(joined, abs=1e-4)


def test_a_long_line_is_cut_or_refused(short: DocumentLineTranslator) -> None:
    lines = [SourceLine(text, document="1") for text in ("w20", LONG, "w21 w22")]
    first = short.system.base.cut_to_fit(LONG, "truncate", "")[0]
    found = list(short.translate(lines, SEARCH, long="truncate"))
    expected = list(short.translate([lines[0], replace(lines[1], text=first), lines[2]], SEARCH))
    assert [own.text for own in found] == [own.text for own in expected]
    assert found[1].source == LONG
    with pytest.raises(UserError, match="line 2 has more than the 9 tokens the model can read"):
        list(short.translate(lines, SEARCH, long="error"))


def test_a_refused_line_is_named_by_its_place_in_the_file(short: DocumentLineTranslator) -> None:
    lines = [DocumentLine("1", "w1", None), SeparatorLine(""), DocumentLine("2", "w1 " * 99, None)]
    given = [own for own in in_context(lines, short.documents) if isinstance(own, SourceLine)]
    with pytest.raises(UserError, match=r"^line 3 has more than the "):
        list(short.translate(given, SEARCH, long="error"))


def test_lengths_and_repeats_are_those_of_the_current_sentence(runs: Path) -> None:
    """A model that writes previous translations again counts none of their tokens."""
    translator = load_once(runs / "2-to-2")
    search = SEARCH.model_copy(update={"min_length": 3, "no_repeat_ngram": 1, "max_length_b": 9})
    for translation in translator.translate(lines_of(translator, DOCUMENTS), search):
        if translation.source:
            tokens = translation.hypotheses[0].tokens
            assert len(tokens) >= 3
            assert len(set(tokens)) == len(tokens)


def test_joined_sentences_that_are_too_long_lose_the_oldest(
    tmp_path: Path,
) -> None:
    """Four sentences of 3 tokens and three breaks do not fit into 10; two and one do."""
    run = make_context_run(tmp_path / "run", CONCATENATED["4-to-4"], max_positions=10)
    translator = load_once(run)
    document = ["w1 w2", "w3 w4", "w5 w6", "w7 w8"]
    found = translate(translator, [document])[-1]
    assert len(found.hypotheses[0].tokens) > 0
    targets = ("w1 w2", "w3 w4", "w5 w6")
    line = SourceLine("w7 w8", tuple(document[:3]), target_context=targets)
    cut = replace(line, context=line.context[1:], target_context=targets[1:])
    one, two = score(translator, [(line, "w9"), (cut, "w9")])
    assert one.log_prob == pytest.approx(two.log_prob, abs=1e-5)


# A score is what the search finds


def test_a_score_is_that_of_the_search(translator: DocumentLineTranslator) -> None:
    """The draft of a model that corrects some is that of the run's own search settings.

    A file is scored after its own lines; also where what the encoder reads before the oldest
    sentence of a context is itself none of the context.
    """
    for member in translator.system.base.members:
        member.card = member.card.model_copy(update={"search": SEARCH})
    lines = lines_of(translator, DOCUMENTS)
    found = list(translator.translate(lines, nbest=2))
    best = [" ".join(own.hypotheses[0].tokens) for own in found]
    in_file = list(score_documents(translator, zip(lines, best, strict=True)))
    pairs, expected = [], []
    for (line, _), own in zip(
        in_reference_context(zip(lines, best, strict=True), 10), found, strict=True
    ):
        for hypothesis in own.hypotheses if own.source else ():
            pairs.append((line, " ".join(hypothesis.tokens)))
            expected.append(hypothesis)
    for own, hypothesis in zip(score(translator, pairs), expected, strict=True):
        assert own.tokens == len(hypothesis.token_log_probs)
        assert own.log_prob == pytest.approx(hypothesis.log_prob, abs=1e-4)
    for own, translation in zip(in_file, found, strict=True):
        if translation.source:
            (first, *_) = translation.hypotheses
            assert own.log_prob == pytest.approx(first.log_prob, abs=1e-4)


def some_pairs(translator: DocumentLineTranslator) -> list[tuple[SourceLine, str]]:
    lines = lines_of(translator, DOCUMENTS)
    targets = [f"w{number} w{number + 3}" for number in range(len(lines))]
    return list(in_reference_context(zip(lines, targets, strict=True), 10))


def test_company_changes_no_score(
    translator: DocumentLineTranslator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = some_pairs(translator)
    expected = [own.log_prob for own in score(translator, pairs)]
    order = sorted(range(len(pairs)), key=lambda i: i * 7 % len(pairs))
    monkeypatch.setattr("docnmt.sequential._WINDOW", 5)
    found = list(score(translator, [pairs[i] for i in order], batch_tokens=11))
    assert [own.log_prob for own in found] == pytest.approx([expected[i] for i in order], abs=1e-4)
    assert [own.tokens for own in found] == [3] * len(pairs)


def test_only_the_nearest_sentences_are_read_and_no_blank_ones(
    translator: DocumentLineTranslator,
) -> None:
    context = tuple(f"w{number} w9" for number in range(1, 8))
    line = SourceLine("w4 w5", context, target_context=context[::-1])
    expected = as_read(translator, line)
    reads = translator.system.sentences
    assert reads <= len(expected.context) <= reads + 1  # one more that the encoder reads
    assert len(expected.target_context) == (reads if translator.system.reads_target else 0)
    blank = replace(
        line,
        context=(*context[:6], "", context[6]),
        target_context=(*line.target_context[:6], "", line.target_context[6]),
    )
    assert as_read(translator, blank) == expected
    scores = [
        own.log_prob for own in score(translator, [(own, "w8") for own in (line, expected, blank)])
    ]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-4)
    bare = SourceLine("w4 w5")
    assert as_read(translator, bare) == bare
    (without,) = score(translator, [(bare, "w8")])
    assert without.log_prob != pytest.approx(scores[0], abs=1e-3)


def test_no_draft_is_searched_for_without_context(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = load_once(runs / "cadec").system
    assert isinstance(system, ContextSystem)
    found: list[str] = []

    def find_drafts(sentences: Sequence[Sentence], search: SearchConfig) -> None:
        for sentence in sentences:
            found.append(sentence.source_line.text)
            sentence.draft = [5, 2]

    monkeypatch.setattr(system, "_find_drafts", find_drafts)
    lines = [SourceLine("w4"), SourceLine("w5", ("w1",)), SourceLine("w6", ("",))]
    scores = system.score([(line, "w8") for line in lines], 4096, 0.0)
    assert found == ["w5"]
    assert [own.tokens for own in scores] == [2, 2, 2]


def test_one_side_may_lack_context(one: DocumentLineTranslator) -> None:
    lines = [
        SourceLine("w4 w5", ("w1", "w2")),
        SourceLine("w4 w5", target_context=("w1", "w2")),
        SourceLine("w4 w5", ("w1",), target_context=("w1", "w2")),
    ]
    scores = [own.log_prob for own in score(one, [(line, "w8") for line in lines])]
    assert all(map(math.isfinite, scores))


@pytest.mark.parametrize("name", ["source only", "zhang", "2-to-1", "zhang, fused"])
def test_what_reads_no_translations_is_blind_to_them(runs: Path, name: str) -> None:
    translator = load_once(runs / name)
    lines = [
        SourceLine("w4 w5", ("", "w1"), target_context=targets)
        for targets in ((), ("w2",), ("w3 w4",), ("w1", "w2", "w3"), ("", "", "w6"))
    ]
    assert len({as_read(translator, line) for line in lines}) == 1
    scores = [own.log_prob for own in score(translator, [(own, "w8") for own in lines])]
    # Not to the bit: a sigmoid of torch rounds its last few numbers in another way.
    assert scores == pytest.approx([scores[0]] * len(lines), abs=1e-5)


def test_sources_reach_a_model_of_translations_through_these_alone(runs: Path) -> None:
    """A translation is read as the base's decoder saw it, which had read its source."""
    translator = load_once(runs / "target only")
    one, two = (
        next(score(translator, [(SourceLine("w4", (own,), target_context=("w7",)), "w8")]))
        for own in ("w1", "w2 w3")
    )
    assert one.log_prob != pytest.approx(two.log_prob, abs=1e-6)
    assert isinstance(translator.system, ContextSystem)
    assert not translator.system.model.source_layers


def test_label_smoothing_lowers_every_score(one: DocumentLineTranslator) -> None:
    """(1 - e) of the token's log-probability and e / (V - 1) of every other one's."""
    pairs = some_pairs(one)[:3]
    plain, half, smoothed = (
        [own.log_prob for own in score(one, pairs, label_smoothing=rate)]
        for rate in (0.0, 0.25, 0.5)
    )
    assert half == pytest.approx([(a + b) / 2 for a, b in zip(plain, smoothed, strict=True)])
    assert smoothed != pytest.approx(plain, abs=1e-2)


# Reading ahead


def test_documents_are_read_a_window_ahead_only(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("docnmt.sequential._WINDOW", 4)
    read = []

    def documents() -> Iterator[list[str]]:
        for number in range(100):
            read.append(number)
            yield [f"w{number % 30}", "w2"]

    translator = DocumentTranslator(load_once(runs / "layerwise"))
    found = translator.translate(documents(), SEARCH)
    assert read == []
    for number in range(4):
        document = next(found)
        assert [own.source for own in document] == [f"w{number}", "w2"]
        assert len(read) <= number + 4
    with pytest.raises(TypeError, match="a list of sentences, not a string: 'w1'"):
        list(translator.translate(["w1"]))


def test_documents_may_be_empty_or_blank(runs: Path) -> None:
    translator = DocumentTranslator(load_once(runs / "cadec"))
    found = list(translator.translate([["w1"], [], ["", " "], ["w2", "w3"]], SEARCH))
    assert [[own.source for own in document] for document in found] == [
        ["w1"],
        [],
        ["", " "],
        ["w2", "w3"],
    ]
    assert [own.text for own in found[2]] == ["", ""]


# Loading


def test_every_run_is_loaded_as_what_it_is(runs: Path, tmp_path: Path) -> None:
    plain = load(runs / "layerwise" / "base", device="cpu")
    assert isinstance(plain, Translator)
    assert not reads_context(plain)
    assert all(reads_context(load_once(runs / name)) for name in KINDS)
    line = SourceLine("w1", ("w2", "w3"), target_context=("w4",))
    assert as_read(plain, line) == SourceLine("w1")
    make_fused_run(tmp_path / "run", runs / "bert")
    fused = load(tmp_path / "run", device="cpu")
    assert as_read(fused, line) == SourceLine("w1")  # it was trained on sentences


def test_a_context_aware_model_is_in_no_ensemble(runs: Path) -> None:
    base = runs / "layerwise" / "base"
    for run, other in ((runs / "layerwise", base), (base, runs / "2-to-2")):
        with pytest.raises(UserError, match="a context-aware model cannot be part of an ensemble"):
            load(run, ensemble=[other], device="cpu")


def test_a_model_on_a_plain_base_takes_no_encoder(runs: Path) -> None:
    with pytest.raises(UserError, match="is on a plain model: it reads no encoder 'other'"):
        load(runs / "layerwise", encoder="other", device="cpu")


def test_an_encoder_that_moved_is_found(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "moved").symlink_to(runs / "bert")
    run = runs / "layerwise, fused"
    found = load(run, encoder=str(tmp_path / "moved"), encoder_precision="bf16", device="cpu")
    assert isinstance(found, DocumentLineTranslator)
    assert len(translate(found, DOCUMENTS)) == 9
