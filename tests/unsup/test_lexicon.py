import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from unsup.induction import (
    describe_words,
    induced,
    match_words,
    spelling_similarities,
)
from unsup.lexicon import (
    Candidate,
    Dictionary,
    Inflections,
    Lexicon,
    WordVectors,
    csls,
    encode_words,
    from_dictionary,
    from_vectors,
    read_dictionary,
    unit_length,
    with_omission,
)


def words(lexicon: Lexicon, source: str) -> list[str]:
    return [candidate.word for candidate in lexicon.candidates(source)]


def test_read_dictionary(tmp_path: Path) -> None:
    path = tmp_path / "eng-fra.tsv"
    path.write_text(
        "Dog\tchien (animal)\na lot\tbeaucoup\n ago\til y a ...\nodd\n\tvide\ncat\tchat\n"
    )
    dictionary = read_dictionary(path)
    assert dictionary.pairs == {("dog", "chien"), ("cat", "chat")}
    assert dictionary.left_out == {"several words": 2, "no pair": 2}
    assert read_dictionary(path, is_reversed=True).pairs == {("chien", "dog"), ("chat", "cat")}
    assert (dictionary | dictionary).left_out["no pair"] == 4


def test_every_space_separates_words(tmp_path: Path) -> None:
    """Text is split at all of them, so no word of it could be looked up with one inside."""
    path = tmp_path / "eng-fra.tsv"
    path.write_text("a\u00a0lot\tbeaucoup\ncat\tle\u2009chat\n")
    assert read_dictionary(path) == Dictionary(frozenset(), {"several words": 2})


def test_frequent_endings_relate_words() -> None:
    stems = ["walk", "jump", "look", "play"]
    inflections = Inflections([stem + end for stem in stems for end in ("", "ing")] + ["walrus"])
    assert inflections.related("walking") == {"walking": 0.0, "walk": 0.0}
    assert inflections.related("unknown") == {"unknown": 0.0}


def test_dictionary_words_and_their_forms() -> None:
    verbs = ["march", "port", "saut", "jou", "regard"]
    french = Counter({f"{verb}{end}": 1 for verb in verbs for end in ("er", "ant", "e")})
    french["marche"] = 9
    english = Counter(
        {f"{verb}{end}": 1 for verb in ("walk", "jump", "look") for end in ("", "ing")}
    )
    dictionary = Dictionary(
        frozenset({("walk", "marcher"), ("jump", "sauter"), ("dog", "chien")}), {}
    )
    lexicon = from_dictionary(dictionary, english, french)
    assert words(lexicon, "walking")[0] == "marche"
    assert set(words(lexicon, "walking")) == {"marche", "marcher", "marchant"}
    assert math.fsum(math.exp(x.log_prob) for x in lexicon.candidates("walk")) == pytest.approx(1)
    assert lexicon.copied(["look", "look", "walk", "7"]) == {"look": 2, "7": 1}


def test_csls_by_hand() -> None:
    similarities = np.array([[1.0, 0.5], [0.0, 0.5]])
    # One neighbour: rows' best 1, 0.5; columns' best 1, 0.5.
    assert csls(similarities, 1).tolist() == [[0.0, -0.5], [-1.5, 0.0]]


def test_neighbours_add_to_what_is_known() -> None:
    generator = np.random.default_rng(0)
    vectors = unit_length(generator.normal(size=(3, 8)))
    source = WordVectors(("dog", "cat", "7"), vectors)
    target = WordVectors(("chien", "chat", "7"), vectors)
    counts = Counter({"chien": 1, "chat": 1, "7": 1})
    alone = from_vectors(source, target, counts, num_neighbours=1)
    assert words(alone, "dog") == ["chien"]
    assert words(alone, "7") == ["7"]
    known = Lexicon({"dog": (Candidate("chat", 0.0),)})
    both = from_vectors(source, target, counts, known=known, num_neighbours=1)
    assert words(both, "dog") == ["chat", "chien"]
    assert words(both, "cat") == ["chat"]


def test_frequent_words_may_be_left_out() -> None:
    lexicon = with_omission(Lexicon({}), Counter(the=3, dog=1), num_words=1, log_prob=-2.0)
    assert lexicon.candidates("the") == (Candidate("the", 0.0), Candidate("", -2.0))
    assert words(lexicon, "dog") == ["dog"]


def test_an_encoder_lays_translations_together(shared_data: Callable[[str], Path]) -> None:
    from bertfused.pretrained import PretrainedEncoder

    encoder = PretrainedEncoder(str(shared_data("models/me5-small-pruned")))
    english = encode_words(["dog", "water", "seven"], encoder)
    french = encode_words(["chien", "eau", "sept"], encoder)
    nearest = (english.vectors @ french.vectors.T).argmax(1)
    pairs = {word: french.words[place] for word, place in zip(english.words, nearest, strict=True)}
    assert pairs == {"dog": "chien", "water": "eau", "seven": "sept"}


def sentences(generator: random.Random, count: int) -> list[str]:
    """Make sentences of a small grammar whose words differ in company, frequency and place."""
    scenes = [
        (["dog", "cat", "horse"], ["runs", "sleeps"], ["grass", "field"]),
        (["man", "woman", "child"], ["reads", "sings", "walks"], ["street", "house", "park"]),
        (["boat", "ship"], ["sails", "sinks"], ["sea", "river", "lake"]),
    ]
    lines = []
    for _ in range(count):
        who, does, where = generator.choices(scenes, (5, 3, 1))[0]
        pick = [generator.choices(x, [3**-i for i in range(len(x))])[0] for x in (who, does, where)]
        lines.append(f"the {pick[0]} {pick[1]} in a {pick[2]} .")
    return lines


def test_a_made_up_language_is_deciphered() -> None:
    generator = random.Random(1)
    ours, theirs = sentences(generator, 1500), sentences(generator, 1500)
    code = {word: word[::-1].upper() for line in theirs for word in line.split()}
    theirs = [" ".join(code[word] for word in line.split()) for line in theirs]
    source, target = describe_words(ours, dim=12), describe_words(theirs, dim=12)
    match = match_words(source, target)
    lexicon = induced(source, target, match)
    is_right = [words(lexicon, word)[0] == code[word] for word in source.words]
    assert all(is_right[:10])
    assert sum(is_right) >= 0.8 * len(is_right)
    assert words(lexicon, ".") == ["."]
    back = induced(target, source, match.reversed())
    assert words(back, "GOD")[0] == "dog"
    again = match_words(source, target)
    assert np.array_equal(again.closeness, match.closeness)


def test_spelling_similarities_by_hand() -> None:
    # "ab" has the groups <a ab b> <ab ab>; "ac" shares <a only.
    found = spelling_similarities(["ab"], ["ab", "ac", "xy"])
    assert found[0].tolist() == pytest.approx([1.0, 0.2, 0.0])
