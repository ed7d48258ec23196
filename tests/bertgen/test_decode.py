import numpy as np
import pytest
import torch
from bertgen_naive import naive_greedy

from bertfused.config import SearchConfig
from bertfused.search import Decoder, SpecialIds, beam_search
from bertgen.decode import PrefixDecoder, UnrolledDecoder
from bertgen.layout import Images, Source
from bertgen.model import BertGen
from tests.tiny_bertgen import SYMBOLS, make_images, make_lines, make_model

SPECIAL = SpecialIds(bos=SYMBOLS.cls, pad=SYMBOLS.pad, eos=SYMBOLS.stop, unk=59, start=1)
LENGTHS = [(4, 0), (2, 0), (0, 0), (7, 0), (1, 0)]


def search(decoder: Decoder, count: int, beam_size: int = 1, cap: int = 12) -> list[list[int]]:
    config = SearchConfig(beam_size=beam_size, min_length=0)
    found = beam_search(decoder, torch.full((count,), cap), config, special=SPECIAL)
    return [hypotheses[0].ids for hypotheses in found]


def inputs() -> tuple[BertGen, list[Source], Images]:
    sources, _ = make_lines(LENGTHS, [0, -1, 1, 1, 0])
    model = make_model(3).eval()
    with torch.no_grad():
        model.head.bias[SYMBOLS.stop] += 1.7  # so that some end before others
    return model, sources, make_images([2, 4])


def test_greedy_is_the_naive_loop() -> None:
    model, sources, images = inputs()
    ours = search(UnrolledDecoder(model, sources, images, SYMBOLS), len(sources))
    never = (SYMBOLS.cls, SYMBOLS.pad)
    theirs = naive_greedy(model, sources, images, SYMBOLS, 13, never)
    assert [own[:-1] for own in ours] == [own[:12] for own in theirs]
    assert len({len(own) for own in ours}) > 1


@pytest.mark.parametrize("beam_size", [1, 3])
def test_what_is_kept_changes_nothing(beam_size: int) -> None:
    """The prefix mode with keys and values of past steps, and read anew at each."""
    model, sources, images = inputs()
    kept = search(PrefixDecoder(model, sources, images, SYMBOLS), len(sources), beam_size)
    anew = UnrolledDecoder(model, sources, images, SYMBOLS, has_prefix=True)
    assert kept == search(anew, len(sources), beam_size)
    assert len({tuple(own) for own in kept}) > 2


@pytest.mark.parametrize("kind", [UnrolledDecoder, PrefixDecoder])
def test_batch_mates_change_nothing(kind: type[UnrolledDecoder] | type[PrefixDecoder]) -> None:
    model, sources, images = inputs()
    together = search(kind(model, sources, images, SYMBOLS), len(sources), 2)
    alone = [search(kind(model, [own], images, SYMBOLS), 1, 2)[0] for own in sources]
    assert together == alone


def test_the_modes_are_two() -> None:
    """Weights of one do not do in the other: what is read is not the same."""
    model, sources, images = inputs()
    first = UnrolledDecoder(model, sources, images, SYMBOLS)
    second = PrefixDecoder(model, sources, images, SYMBOLS)
    tokens = torch.ones(len(sources), 1, dtype=torch.long)
    assert not torch.allclose(first.step(tokens), second.step(tokens), atol=1e-3)
    assert np.isfinite(second.step(tokens).detach().numpy()).all()
