import base64
import json
from pathlib import Path

import numpy as np
import pytest

from bertfused.errors import UserError
from bertgen.images import ImageStore, pack_images, read_images, write_images

GRID = np.array([[0, 0, 1, 1], [0, 0, 0.5, 1], [0.5, 0, 1, 1]], dtype=np.float32)


def write_grid(path: Path, rows: list[int], **arrays: np.ndarray) -> Path:
    features = np.random.default_rng(1).normal(size=(len(rows), 3, 4)).astype(np.float16)
    found = {"features": features, "boxes": GRID, "rows": np.array(rows)} | arrays
    np.savez(path, allow_pickle=False, **found)
    return path


def write_regions(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


REGIONS = {
    "row": 5,
    "width": 200,
    "height": 100,
    "boxes": [[20, 10, 60, 50], [0, 0, 199, 99]],
    "features": [[1, 2, 3, 4], [3, 4, 5, 6]],
}


def test_a_grid_is_read_as_it_is(tmp_path: Path) -> None:
    path = write_grid(tmp_path / "grid.npz", [4, 2])
    first, second = read_images(path)
    assert (first.row, second.row) == (4, 2)
    assert np.array_equal(second.features, np.load(path)["features"][1])
    assert np.array_equal(first.boxes, GRID)


def test_regions_get_the_whole_image_before_them(tmp_path: Path) -> None:
    (image,) = read_images(write_regions(tmp_path / "a.jsonl", REGIONS))
    assert image.row == 5
    assert image.boxes.tolist() == [
        [0, 0, 1, 1],
        pytest.approx([0.1, 0.1, 0.3, 0.5]),
        pytest.approx([0, 0, 0.995, 0.99]),
    ]
    assert image.features.tolist() == [[2, 3, 4, 5], [1, 2, 3, 4], [3, 4, 5, 6]]


def test_the_whole_image_is_known_by_its_box(tmp_path: Path) -> None:
    """As the official code writes it, in pixels up to width - 1."""
    record = REGIONS | {"boxes": REGIONS["boxes"][::-1]}
    (image,) = read_images(write_regions(tmp_path / "a.jsonl", record))
    assert image.features.tolist() == REGIONS["features"]


def test_numbers_may_be_packed(tmp_path: Path) -> None:
    packed = {
        key: base64.b64encode(np.array(REGIONS[key], dtype="<f4").tobytes()).decode()
        for key in ("boxes", "features")
    }
    (image,) = read_images(write_regions(tmp_path / "a.jsonl", REGIONS | packed))
    (plain,) = read_images(write_regions(tmp_path / "b.jsonl", REGIONS))
    assert np.array_equal(image.features, plain.features)
    assert np.array_equal(image.boxes, plain.boxes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boxes": [[20, 10, 60, 50]]}, "line 1: 2 regions have features, 1 boxes"),
        ({"boxes": [[20, 10, 60], [1, 2, 3]]}, "equally long lists"),
        ({"boxes": [[20, 10, 60, 150], [0, 0, 9, 9]]}, "a box lies outside of the image"),
        ({"features": [[1, 2], [3, float("nan")]]}, "is not finite"),
        ({"features": "!!"}, "line 1: "),
        ({"width": 0}, "have to be above 0"),
        ({"width": None}, "line 1: "),
        ({"row": "x"}, "line 1: "),
    ],
)
def test_what_cannot_be_right_is_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = write_regions(tmp_path / "a.jsonl", REGIONS | changes)
    with pytest.raises(UserError, match=message):
        list(read_images(path))


def test_damaged_and_other_files_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"PK\x03\x04no")
    for path, message in (
        (bad, "cannot read .*bad.npz"),
        (tmp_path / "none.npz", "cannot read .*none.npz: No such file or directory$"),
        (tmp_path / "a.txt", "neither .npz nor .jsonl"),
        (write_grid(tmp_path / "b.npz", [1, 2], boxes=GRID[:2]), "have the shape"),
        (write_grid(tmp_path / "c.npz", [1, 2], boxes=np.stack([GRID] * 3)), "equally many images"),
        (write_regions(tmp_path / "d.jsonl", {"row": 1}), "there is no 'width'"),
    ):
        with pytest.raises(UserError, match=message):
            list(read_images(path))
    np.savez(tmp_path / "e.npz", features=np.zeros((1, 3, 4)))
    with pytest.raises(UserError, match="has no array 'boxes'"):
        list(read_images(tmp_path / "e.npz"))


def test_a_store_gives_back_what_was_written(tmp_path: Path) -> None:
    grid = write_grid(tmp_path / "grid.npz", [4, 2])
    regions = write_regions(tmp_path / "a.jsonl", REGIONS)
    numbers = write_images(tmp_path, [grid, regions])
    assert numbers == {grid: {4: 0, 2: 1}, regions: {5: 2}}
    store = ImageStore(tmp_path)
    assert len(store) == 3
    assert store.feature_dim == 4
    assert store.sizes(np.array([0, 1, 2])).tolist() == [3, 3, 3]
    images = store.batch([2, 0])
    assert images.first.tolist() == [0, 3]
    originals = [*read_images(grid), *read_images(regions)]
    wanted = pack_images([originals[2], originals[0]], 4)
    assert images.features.tolist() == wanted.features.tolist()
    assert images.boxes.tolist() == wanted.boxes.tolist()
    assert len(store.batch([]).features) == 0


def test_no_images_are_a_store_too(tmp_path: Path) -> None:
    write_images(tmp_path, [])
    store = ImageStore(tmp_path)
    assert (len(store), store.feature_dim) == (0, 0)


def test_images_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    twice = write_regions(tmp_path / "a.jsonl", REGIONS, REGIONS)
    with pytest.raises(UserError, match="has two images of row 5"):
        write_images(tmp_path, [twice])
    narrow = write_regions(tmp_path / "b.jsonl", REGIONS | {"features": [[1], [2]]})
    grid = write_grid(tmp_path / "grid.npz", [4])
    with pytest.raises(UserError, match="have the width 1, those before them 4"):
        write_images(tmp_path, [grid, narrow])
    with pytest.raises(UserError, match="have the width 1, but the model reads 4"):
        pack_images(list(read_images(narrow)), 4)


def test_a_damaged_store_is_named(tmp_path: Path) -> None:
    write_images(tmp_path, [write_grid(tmp_path / "grid.npz", [4])])
    path = tmp_path / "images.features.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"features.bin: its length is not what"):
        ImageStore(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="cannot read"):
        ImageStore(tmp_path)
