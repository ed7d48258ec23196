"""Can the weights of the matching of words be chosen without a pair? By round trips.

`unsup.induction.match_words` adds to the nearness of two words' company how alike their frequencies
are, and their places in the sentence, each with a weight. Here the weights vary, on the texts of
the strict setting of En-Fr (`unsup_pairs.py`): lines of both texts are translated word by word
there and back, and BLEU against themselves chooses. BLEU on dev pairs stands beside it, and is not
looked at in choosing. The claim: the defaults are chosen. Refuted by another choice.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from common import REPOSITORY, publish, table
from unsup_pairs import PAIRS, Experiment

from bertfused.metrics import bleu
from unsup.induction import describe_words, induced, match_words
from unsup.language_model import train_language_model
from unsup.lexicon import with_omission
from unsup.word_by_word import WordByWord, translate_lines

WEIGHTS = [(frequency, place) for frequency in (0.0, 0.2, 0.5) for place in (0.0, 1.0, 2.0, 4.0)]
CHOSEN = (0.2, 2.0)  # the defaults


def main() -> None:
    """Match with each pair of weights, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=200, help="of each text, and of dev")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "unsup_matching")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    args = parser.parse_args()
    experiment = Experiment("en-fr", args.out, 0.0, 0.0, args.quick)
    experiment.write_texts()
    languages, count = PAIRS["en-fr"].directions[0], 5 if args.quick else args.lines
    texts = {language: experiment.text(f"mono.{language}") for language in languages}
    models = {language: train_language_model(lines) for language, lines in texts.items()}
    words = {language: describe_words(lines) for language, lines in texts.items()}
    counts = {
        own: Counter(w for line in lines for w in line.split()) for own, lines in texts.items()
    }
    found: list[dict[str, Any]] = []
    for frequency, place in WEIGHTS[:2] if args.quick else WEIGHTS:
        first, second = languages
        match = match_words(
            words[first], words[second], frequency_weight=frequency, place_weight=place
        )
        both = {
            first: induced(words[first], words[second], match),
            second: induced(words[second], words[first], match.reversed()),
        }
        into = {
            source: WordByWord(with_omission(both[source], counts[source]), models[target])
            for source, target in (languages, languages[::-1])
        }
        result: dict[str, Any] = {"weights": (frequency, place), "agreement": match.agreement}
        for source, target in (languages, languages[::-1]):
            lines = texts[source][:: max(len(texts[source]) // count, 1)][:count]
            there = list(translate_lines(lines, into[source]))
            back = list(translate_lines(there, into[target]))
            result[f"round trip {source}"] = bleu(back, lines, tokenize="none").value
            dev = experiment.text(f"dev.{source}")[:count]
            translated = list(translate_lines(dev, into[source]))
            references = experiment.text(f"dev.{target}")[:count]
            result[f"{source}-{target}"] = bleu(translated, references, tokenize="none").value
        found.append(result)
        print(result, flush=True)
    trips = [sum(own[f"round trip {language}"] for language in languages) / 2 for own in found]
    best = found[trips.index(max(trips))]["weights"]
    rows = [
        (
            *own["weights"],
            f"{own['agreement']:.3f}",
            f"{trip:.1f}" + (" (chosen)" if own["weights"] == best else ""),
            *(f"{own[name]:.1f}" for name in ("en-fr", "fr-en")),
        )
        for own, trip in zip(found, trips, strict=True)
    ]
    header = ("frequency", "place", "agreement", "round trip", "dev en-fr", "dev fr-en")
    verdict = "are chosen" if best == CHOSEN else "are **not** chosen"
    text = [
        "## Unsupervised translation: the weights of the matching of words",
        "",
        "En-Fr, strict: words matched in two texts, lines translated word by word there and back "
        f"({count} of each text). The defaults, {CHOSEN[0]} and {CHOSEN[1]}, {verdict}. (A wrong "
        "match may be as faithful there and back; BLEU on dev, only watched, tells.) Made by "
        "`benchmarks/unsup_matching.py`.",
        "",
        table(header, rows),
    ]
    publish("unsup-matching", "\n".join(text), {"found": found}, args.out, quick=args.quick)


if __name__ == "__main__":
    main()
