"""Checkpoints of others: their data is unpickled with an allow-list, their code never runs."""

import argparse
import pickle
import re
import warnings
from _codecs import encode
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertfused.errors import UserError


class _Inert:
    """Stands for a class whose objects are read past: training meters and the like."""


_METERS = ("AverageMeter", "TimeMeter", "StopwatchMeter")
# With --eval-bleu fairseq keeps counts of the validation in arrays.
_ARRAY_MAKERS = {
    f"{package}.multiarray.{name}": value.__reduce__()[0]
    for package in ("numpy.core", "numpy._core")
    for name, value in (("_reconstruct", np.zeros(1)), ("scalar", np.float64(0)))
}
_ALLOWED: list[Any] = [
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    *(type(np.dtype(name)) for name in ("int32", "int64", "float32", "float64")),
    encode,
    *((maker, name) for name, maker in _ARRAY_MAKERS.items()),
    *((_Inert, f"fairseq.meters.{name}") for name in _METERS),
]


def load_pickle(path: Path) -> dict[str, Any]:
    """Read what ``torch.save`` wrote, of any version, onto the CPU.

    Raises:
        UserError: If the file is not such a checkpoint, or names anything but the plain data that
            checkpoints are made of. Nothing of it has run by then.
    """
    try:
        with torch.serialization.safe_globals(_ALLOWED), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other protocols; what fails is reported below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{path} is refused: it wants to call {refused[1]}, which no checkpoint needs"
            ) from None
        raise UserError(f"{path} is not a checkpoint of plain data") from error
    except Exception as error:  # damaged bytes make an unpickler fail in any way
        raise UserError(f"{path} is not a checkpoint, or a damaged one") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
    return content
