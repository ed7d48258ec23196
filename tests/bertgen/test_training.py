import copy
import itertools

import numpy as np
import pytest
import torch
from bertgen_naive import naive_logits, naive_loss
from torch.nn import functional

from bertgen.layout import Images, unrolled, with_prefix
from bertgen.model import BertGen
from tests.tiny_bertgen import FEATURES, SYMBOLS, make_images, make_lines, make_model


def gradients(model: BertGen) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def in_double(images: Images) -> Images:
    return Images(images.features.double(), images.boxes.double(), images.first, images.sizes)


@pytest.mark.parametrize("image_of", [[-1, -1, -1], [1, 0, 1], [0, -1, 1]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fast_training_is_naive_unrolling(image_of: list[int], dtype: torch.dtype) -> None:
    """Mean loss and every gradient within 1e-6, in double precision of its largest entry."""
    sources, targets = make_lines([(4, 6), (2, 0), (0, 3)], image_of)
    images = make_images([3, 6])
    model = make_model().to(dtype)
    images = in_double(images) if dtype == torch.float64 else images
    count = sum(len(own) + 1 for own in targets)
    naive = naive_loss(model, sources, [own.tolist() for own in targets], images, SYMBOLS) / count
    naive.backward()
    theirs = gradients(model)
    model.zero_grad()
    ends = [np.append(own, SYMBOLS.stop) for own in targets]
    turns = [(i, end) for i, own in enumerate(ends) for end in range(len(own))]
    sequences = unrolled(
        [sources[i] for i, _ in turns], [ends[i][:end] for i, end in turns], images, SYMBOLS
    )
    logits = model(sequences, model.objects(images))
    loss = functional.cross_entropy(logits, torch.from_numpy(np.concatenate(ends)))
    loss.backward()
    assert loss.item() == pytest.approx(naive.item(), rel=1e-6)
    for name, gradient in gradients(model).items():
        largest = theirs[name].abs().max().item() if dtype == torch.float64 else 1.0
        assert (gradient - theirs[name]).abs().max().item() <= max(1e-6 * largest, 1e-12), name
        assert theirs[name].abs().max() > 0 or image_of == [-1, -1, -1] or "key" in name, name


def test_the_prefix_mode_predicts_as_if_nothing_came_after() -> None:
    """Each prediction is that of a sequence that ends there, alone in its batch."""
    sources, targets = make_lines([(4, 6), (2, 0), (0, 3)], [1, -1, 0])
    images = make_images([3, 6])
    model = make_model().eval()
    seen = model.objects(images)
    logits = model(with_prefix(sources, targets, images, SYMBOLS), seen)
    start = 0
    for source, target in zip(sources, targets, strict=True):
        for end in range(len(target) + 1):
            alone = model(with_prefix([source], [target[:end]], images, SYMBOLS), seen)[-1]
            assert torch.allclose(logits[start + end], alone, atol=1e-5)
        start += len(target) + 1


def test_batch_mates_change_nothing() -> None:
    sources, targets = make_lines([(4, 6), (2, 1), (0, 3), (9, 2)], [1, -1, 0, 1])
    images = make_images([3, 6])
    model = make_model().eval()
    seen = model.objects(images)
    logits = model(unrolled(sources, targets, images, SYMBOLS), seen)
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        alone = model(unrolled([source], [target], images, SYMBOLS), seen)
        assert torch.allclose(logits[row], alone[0], atol=1e-5)


def test_an_image_matters_and_so_does_each_region() -> None:
    sources, targets = make_lines([(3, 2)], [0])
    images = make_images([3])
    model = make_model().eval()
    before = model(unrolled(sources, targets, images, SYMBOLS), model.objects(images))
    for row, changed in itertools.product(range(3), ("features", "boxes")):
        other = copy.deepcopy(images)
        getattr(other, changed)[row] += 0.1
        after = model(unrolled(sources, targets, other, SYMBOLS), model.objects(other))
        assert (after - before).abs().max() > 1e-4


def test_text_alone_needs_no_images() -> None:
    sources, targets = make_lines([(3, 2)], [-1])
    model = make_model().eval()
    none = Images.none(FEATURES)
    logits = model(unrolled(sources, targets, none, SYMBOLS), model.objects(none))
    ids = [sources[0].into, SYMBOLS.cls, *sources[0].ids.tolist(), SYMBOLS.sep]
    ids += [*targets[0].tolist(), SYMBOLS.mask, SYMBOLS.sep]
    theirs = naive_logits(model, [ids], none, [-1])
    assert torch.allclose(logits[0], theirs[0, len(ids) - 2], atol=1e-5)
