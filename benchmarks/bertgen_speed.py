"""What do BERTGEN's exact savings bring, in training and in decoding? And its prefix mode?

One thread, wall time, a model of 6 layers and 384 wide with random weights or, for decoding, a
trained RUN on sentences of Multi30k. Naive is `bertgen_naive.py`: padded copies, logits at all
positions, every row to the end of the longest. Both give the same, which is checked first; they
take turns, and the median of the turns' ratios is quoted.

The claims: a step of training on a sentence of 15 source and 18 target pieces is at least 2.3 times
as fast as naive unrolling, greedy decoding 3.5 times, token for token the same. The prefix mode,
which has to be trained as such, stands beside them: it is another model.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bertgen_naive import naive_greedy, naive_loss
from common import REPOSITORY, publish, spread, table, text_to_translate
from torch.nn import functional

from bertfused.config import SearchConfig
from bertfused.console import keep_freed_memory
from bertfused.search import Decoder, SpecialIds, beam_search
from bertgen.card import load_model
from bertgen.decode import PrefixDecoder, UnrolledDecoder
from bertgen.layout import Images, Sequences, Source, Symbols, unrolled, with_prefix
from bertgen.model import BertGen

VOCAB = 36_320  # that of me5-small-pruned, with its symbols
SYMBOLS = Symbols(cls=0, sep=2, mask=36_309, stop=36_310, pad=1, into={"de": 36_311})
SOURCE, TARGET = 15, 18


def make_model(layers: int, model_dim: int) -> BertGen:
    """Build a model with random weights."""
    torch.manual_seed(1)
    return BertGen(
        vocab_size=VOCAB,
        model_dim=model_dim,
        layers=layers,
        heads=12,
        ffn_dim=4 * model_dim,
        feature_dim=256,
        dropout=0.0,
        attention_dropout=0.0,
    )


def in_turns(systems: dict[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Time functions one after the other, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(turns):
        for name, run in list(systems.items())[:: 1 if turn % 2 == 0 else -1]:
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def training(model: BertGen, turns: int) -> dict[str, list[float]]:
    """Time losses and gradients of one sentence."""
    random = np.random.default_rng(1)
    source = Source(random.integers(10, 36_000, SOURCE), SYMBOLS.into["de"])
    target, none = random.integers(10, 36_000, TARGET), Images.none(256)
    end = np.append(target, SYMBOLS.stop)

    def step(lay_out: Callable[[], Sequences]) -> float:
        model.zero_grad()
        logits = model(lay_out(), model.objects(none))
        loss = functional.cross_entropy(logits, torch.from_numpy(end), reduction="sum")
        loss.backward()
        return float(loss.detach())

    def naive() -> float:
        model.zero_grad()
        loss = naive_loss(model, [source], [target.tolist()], none, SYMBOLS)
        loss.backward()
        return float(loss.detach())

    def copies() -> Sequences:
        return unrolled([source] * len(end), [end[:i] for i in range(len(end))], none, SYMBOLS)

    fast, slow = step(copies), naive()
    assert abs(fast - slow) < 1e-5 * slow, (fast, slow)
    systems = {
        "naive": naive,
        "exact savings": lambda: step(copies),
        "prefix mode": lambda: step(lambda: with_prefix([source], [target], none, SYMBOLS)),
    }
    return in_turns(systems, turns)


def decoding(
    model: BertGen, sources: list[Source], symbols: Symbols, cap: int, turns: int
) -> dict[str, list[float]]:
    """Time greedy decoding of a batch."""
    none, never = Images.none(model.objects.feature_dim), (symbols.cls, symbols.pad)
    special = SpecialIds(
        bos=symbols.cls, pad=symbols.pad, eos=symbols.stop, unk=3, start=symbols.stop
    )

    @torch.inference_mode()
    def search(kind: Callable[..., Decoder]) -> list[list[int]]:
        decoder = kind(model, sources, none, symbols)
        limits = torch.full((len(sources),), cap)
        found = beam_search(decoder, limits, SearchConfig(beam_size=1), special=special)
        return [own[0].ids[:-1] for own in found]

    @torch.inference_mode()
    def naive() -> list[list[int]]:
        return naive_greedy(model, sources, none, symbols, cap + 1, never)

    theirs = [own[:cap] for own in naive()]
    assert search(UnrolledDecoder) == theirs
    systems = {
        "naive": naive,
        "exact savings": lambda: search(UnrolledDecoder),
        "prefix mode": lambda: search(PrefixDecoder),
    }
    return in_turns(systems, turns)


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return how many times as fast as naive the others are, turn by turn."""
    naive = seconds["naive"]
    return {
        name: [slow / own for slow, own in zip(naive, times, strict=True)]
        for name, times in seconds.items()
        if name != "naive"
    }


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="trained RUN that is decoded with")
    parser.add_argument("--to", default="de", help="language that it writes")
    parser.add_argument("--lines", type=int, default=16, help="of a batch that is decoded")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "bertgen_speed")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    turns = 1 if args.quick else args.turns
    model = make_model(1, 96) if args.quick else make_model(6, 384)
    found = {"training": training(model, turns)}
    symbols, cap = SYMBOLS, 4 if args.quick else 20
    lines = text_to_translate(None, 2 if args.quick else args.lines)
    random = np.random.default_rng(2)
    sources = [Source(random.integers(10, 36_000, SOURCE), SYMBOLS.into["de"]) for _ in lines]
    if args.run is not None:
        card, model, tokenizer = load_model(args.run)
        symbols, cap = card.symbols.symbols, 60
        into = symbols.into[args.to]
        sources = [Source(np.array(ids), into) for ids in tokenizer.split(lines)]
    found["greedy decoding"] = decoding(model.eval(), sources, symbols, cap, turns)
    goals = {"training": 2.3, "greedy decoding": 3.5}
    rows = [
        (
            what,
            name,
            spread(own),
            ("yes" if sorted(own)[len(own) // 2] >= goals[what] else "**no**")
            if name == "exact savings"
            else "another model",
        )
        for what, seconds in found.items()
        for name, own in ratios(seconds).items()
    ]
    weights = (
        "random weights, so that no line ends early"
        if args.run is None
        else "a trained model, each row to its end"
    )
    text = [
        "## BERTGEN: what its exact savings bring",
        "",
        f"Times as fast as naive unrolling, one thread; training on a sentence of {SOURCE} and "
        f"{TARGET} pieces, decoding a batch of {len(sources)} with {weights}. Made by "
        "`benchmarks/bertgen_speed.py`.",
        "",
        table(("", "", "times as fast", "goal (2.3 and 3.5) met"), rows),
    ]
    publish("bertgen-speed", "\n".join(text), {"seconds": found}, args.out, quick=args.quick)


if __name__ == "__main__":
    main()
