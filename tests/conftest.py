from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

SHARED = Path(__file__).resolve().parents[2] / "shared"

# Time is the benchmarks' business: on a busy machine a deadline fails for no fault of the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Small models are fastest so, and sums have one order.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Return the path of a file or folder in ../shared, or skip the test where it is absent."""

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"../shared/{name} is absent")
        return path

    return find
