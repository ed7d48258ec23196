"""Features of images: how other programs' files are read, and how DATA keeps them.

A file says, of some lines of the text, what its image looks like.

``.npz`` (NumPy), for images with equally many regions::

    features  [images, regions, feature_dim]
    boxes     [regions, 4] or [images, regions, 4]: x1, y1, x2, y2 as shares of width and height
    rows      [images]: numbers of lines, from 0; 0, 1, 2, ... if absent

``.jsonl`` (``.gz``, ``.zst``), an object a line, for detectors::

    {"row": 7, "width": 640, "height": 480, "boxes": [[x1, y1, x2, y2], ...] in pixels,
     "features": [[...], ...]}       lists, or base64 of float32 as in VL-BERT's files

The first region has to be the whole image; where it is not, the whole image is put before the
others, with the mean of their features. The cells of a grid are regions like any other.
"""

import base64
import binascii
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertfused.errors import UserError
from bertfused.text import read_lines, replace_file
from bertgen.layout import Images

Numbers = NDArray[np.int64]
_FEATURES, _INDEX = "images.features.bin", "images.npz"
_WHOLE = np.array([0.0, 0.0, 1.0, 1.0], dtype=np.float32)
_SLACK = 0.01  # a box in whole pixels ends one pixel before the image does


@dataclass(frozen=True)
class ImageFeatures:
    """One image: the line beside which it stands, and its regions."""

    row: int
    features: NDArray[np.floating[Any]]
    boxes: NDArray[np.float32]


def read_images(path: Path) -> Iterator[ImageFeatures]:
    """Read the images of a file.

    Raises:
        UserError: If the file cannot be read, or something in it cannot be right.
    """
    if path.suffix == ".npz":
        found = _read_npz(path)
    elif ".jsonl" in path.suffixes:
        found = _read_jsonl(path)
    else:
        raise UserError(f"{path} is neither .npz nor .jsonl")
    for image, where in found:
        if len(image.boxes) != len(image.features) or not len(image.features):
            raise UserError(
                f"{where}: {len(image.features)} regions have features, {len(image.boxes)} boxes"
            )
        if not np.isfinite(image.features).all() or not np.isfinite(image.boxes).all():
            raise UserError(f"{where}: a feature or a box is not finite")
        if image.boxes.min() < -_SLACK or image.boxes.max() > 1 + _SLACK:
            raise UserError(f"{where}: a box lies outside of the image")
        yield _with_whole(image)


def _with_whole(image: ImageFeatures) -> ImageFeatures:
    if np.abs(image.boxes[0] - _WHOLE).max() <= _SLACK:
        return image
    mean = image.features.mean(0, keepdims=True, dtype=np.float32).astype(image.features.dtype)
    features = np.concatenate([mean, image.features])
    return ImageFeatures(image.row, features, np.concatenate([_WHOLE[None], image.boxes]))


def _read_npz(path: Path) -> Iterator[tuple[ImageFeatures, str]]:
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as arrays:
            missing = {"features", "boxes"} - {*arrays.files}
            if missing:
                raise UserError(f"{path} has no array {min(missing)!r}")
            features, boxes = arrays["features"], arrays["boxes"].astype(np.float32)
            rows = arrays["rows"] if "rows" in arrays.files else np.arange(len(features))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    if features.ndim != 3 or boxes.shape[-2:] != (features.shape[1], 4):
        raise UserError(
            f"{path}: features have the shape {features.shape} and boxes {boxes.shape}, not "
            "[images, regions, feature_dim] and [regions, 4] or [images, regions, 4]"
        )
    if len(rows) != len(features) or (boxes.ndim == 3 and len(boxes) != len(features)):
        raise UserError(f"{path}: rows, features and boxes are not of equally many images")
    if boxes.ndim == 2:
        boxes = np.broadcast_to(boxes, (len(features), *boxes.shape))
    for number, row in enumerate(rows.tolist()):
        yield ImageFeatures(int(row), features[number], boxes[number]), f"{path}, image {number}"


def _read_jsonl(path: Path) -> Iterator[tuple[ImageFeatures, str]]:
    for number, line in enumerate(read_lines(path)):
        where = f"{path}, line {number + 1}"
        try:
            record = json.loads(line)
            size = np.array([float(record["width"]), float(record["height"])] * 2)
            if not (size > 0).all():
                raise ValueError("width and height have to be above 0")
            boxes = (_array(record["boxes"], 4) / size).astype(np.float32)
            features = _array(record["features"], None, len(boxes))
            image = ImageFeatures(int(record.get("row", number)), features, boxes)
        except KeyError as error:
            raise UserError(f"{where}: there is no {error.args[0]!r}") from error
        except (ValueError, TypeError, binascii.Error) as error:
            raise UserError(f"{where}: {error}") from error
        yield image, where


def _array(value: Any, width: int | None, rows: int = -1) -> NDArray[np.float32]:
    if isinstance(value, str):
        flat = np.frombuffer(base64.b64decode(value, validate=True), dtype="<f4")
        return flat.reshape(rows, -1 if width is None else width).astype(np.float32)
    array = np.array(value, dtype=np.float32)
    if array.ndim != 2 or (width is not None and array.shape[1] != width):
        raise ValueError("boxes and features have to be lists of equally long lists")
    return array


class ImageStore:
    """The images of a DATA folder, read without loading them.

    ``images.features.bin`` holds all regions one after the other, ``images.npz`` their boxes,
    where each image begins, and the width and type of the features.

    Raises:
        UserError: If a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / _INDEX
        try:
            with path.open("rb") as handle, np.load(handle, allow_pickle=False) as arrays:
                self.boxes, self._first = arrays["boxes"], arrays["first"]
                self.feature_dim = int(arrays["feature_dim"])
                dtype = np.dtype(str(arrays["dtype"]))
            shape = (len(self.boxes), self.feature_dim)
            path = folder / _FEATURES
            if path.stat().st_size != int(np.prod(shape)) * dtype.itemsize:
                raise ValueError(f"its length is not what {_INDEX} says")
            self.features: NDArray[Any] = np.zeros(shape, dtype)
            if len(self.boxes):
                self.features = np.memmap(path, dtype, "r", shape=shape)
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot read {path}: {reason}") from error

    def __len__(self) -> int:
        return len(self._first) - 1

    def sizes(self, numbers: Numbers) -> Numbers:
        """Return how many regions images have, the whole one counted."""
        sizes: Numbers = self._first[numbers + 1] - self._first[numbers]
        return sizes

    def __getitem__(self, i: int) -> ImageFeatures:
        span = slice(int(self._first[i]), int(self._first[i + 1]))
        return ImageFeatures(i, self.features[span], self.boxes[span])

    def batch(self, numbers: Sequence[int]) -> Images:
        """Return some images."""
        return pack_images([self[i] for i in numbers], self.feature_dim)


def pack_images(images: Sequence[ImageFeatures], feature_dim: int) -> Images:
    """Put images one after the other, as the model reads them.

    Raises:
        UserError: If the features have another width.
    """
    for image in images:
        if image.features.shape[1] != feature_dim:
            raise UserError(
                f"the features of image {image.row} have the width {image.features.shape[1]}, but "
                f"the model reads {feature_dim}"
            )
    if not images:
        return Images.none(feature_dim)
    features = np.concatenate([image.features for image in images]).astype(np.float32)
    boxes = np.concatenate([image.boxes for image in images])
    sizes = torch.tensor([len(image.boxes) for image in images])
    first = sizes.cumsum(0) - sizes
    return Images(torch.from_numpy(features), torch.from_numpy(boxes), first, sizes)


def write_images(folder: Path, files: Sequence[Path]) -> dict[Path, dict[int, int]]:
    """Write the images of some files as ``ImageStore`` reads them, one after the other.

    Returns:
        By file and line, the numbers of the images.

    Raises:
        UserError: If a file cannot be read, or two images are of one line or of different widths.
    """
    numbers: dict[Path, dict[int, int]] = {}
    boxes, first, width, dtype = [np.zeros((0, 4), np.float32)], [0], 0, np.dtype(np.float32)
    with replace_file(folder / _FEATURES) as handle:
        for path in files:
            own = numbers[path] = {}
            for image in read_images(path):
                if len(first) == 1:
                    width, dtype = image.features.shape[1], image.features.dtype
                if image.features.shape[1] != width:
                    raise UserError(
                        f"{path}: features of row {image.row} have the width "
                        f"{image.features.shape[1]}, those before them {width}"
                    )
                if image.row in own:
                    raise UserError(f"{path} has two images of row {image.row}")
                own[image.row] = len(first) - 1
                handle.write(np.ascontiguousarray(image.features, dtype).tobytes())
                boxes.append(image.boxes)
                first.append(first[-1] + len(image.boxes))
    with replace_file(folder / _INDEX) as handle:
        np.savez(
            handle,
            boxes=np.concatenate(boxes),
            first=np.array(first),
            feature_dim=np.array(width),
            dtype=np.array(dtype.str),
        )
    return numbers
