"""Two languages' texts without a pair between them, for `unsup_pairs.py`.

en-fr   Halves of Multi30k (Lample et al., 2018): English of pairs 1 to 14,500, French of pairs
        14,501 to 29,000.
en-ro   RO-STS, English of one half of its groups of sentences, Romanian of the other, with some
        of Multi30k's English and of the glosses of the Romanian WordNet beside them.

All of it lower-cased and tokenised by Moses' rules. No monolingual line stands in dev or test, but
for case and punctuation, and what of Multi30k does is as published.
"""

from collections.abc import Iterable
from random import Random

from backtranslation_ro_en import groups, read_ro_sts, unique
from common import shared_data

from backtranslation.leaks import normalised
from bertfused.text import SentencePair, read_lines

Texts = dict[str, list[str]]
_EXTRA = 10_000  # lines of other text beside RO-STS


def tokenised(lines: Iterable[str], language: str) -> list[str]:
    """Return lines lower-cased and tokenised by Moses' rules."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalise, moses = MosesPunctNormalizer(language), MosesTokenizer(language)
    return [
        moses.tokenize(normalise.normalize(line.lower()), return_str=True, escape=False)
        for line in lines
    ]


def english_french() -> Texts:
    """Return the texts of En-Fr; ``pairs`` are the ceiling's, of the English half."""
    texts: Texts = {}
    for language in ("en", "fr"):
        read = {
            split: tokenised(
                read_lines(shared_data("multi30k") / f"{split}.{language}.gz"), language
            )
            for split in ("train", "val", "test_2016_flickr")
        }
        train = read["train"]
        texts |= {
            f"mono.{language}": train[:14_500] if language == "en" else train[14_500:],
            f"pairs.{language}": train[:14_500],
            f"dev.{language}": read["val"],
            f"test.{language}": read["test_2016_flickr"],
        }
    return texts


def english_romanian() -> Texts:
    """Return the texts of En-Ro; ``pairs`` are the ceiling's, of the English half."""
    held_out = {split: unique(read_ro_sts(split)) for split in ("dev", "test")}
    known = {normalised(line) for pairs in held_out.values() for pair in pairs for line in pair}

    def is_clean(lines: Iterable[str]) -> bool:
        return known.isdisjoint(map(normalised, lines))

    clean = [group for group in groups(read_ro_sts("train")) if all(map(is_clean, group))]
    Random(1).shuffle(clean)
    first, second = (_pairs(clean[start::2]) for start in (0, 1))
    captions = filter(lambda line: is_clean([line]), _lines("multi30k", "train.en.gz"))
    glosses = filter(lambda line: is_clean([line]), _lines("rowordnet", "glosses.ro.gz"))
    raw = {
        "mono.en": [pair.target for pair in first] + _some(captions),
        "mono.ro": [pair.source for pair in second] + _some(glosses),
    }
    held_out["dev"] = held_out["dev"][:1000]
    for name, pairs in {"pairs": first, **held_out}.items():
        raw |= {f"{name}.ro": [p.source for p in pairs], f"{name}.en": [p.target for p in pairs]}
    return {name: tokenised(lines, name[-2:]) for name, lines in raw.items()}


def _lines(data: str, name: str) -> Iterable[str]:
    return read_lines(shared_data(data) / name)


def _pairs(found: Iterable[list[SentencePair]]) -> list[SentencePair]:
    return [pair for group in found for pair in unique(group)]


def _some(lines: Iterable[str]) -> list[str]:
    kept = list(dict.fromkeys(lines))
    return Random(2).sample(kept, min(_EXTRA, len(kept)))
