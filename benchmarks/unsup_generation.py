"""What does translating back cost in training? Its share of the time of a back-translation step.

A trained RUN goes on with back-translation only, greedy, by the averaged weights, with batches of
several sizes in turn. The claim, at most 40% of the step's time, is refuted by the table.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from common import REPOSITORY, publish, spread, table

from bertfused.config import check_recipe
from bertfused.console import keep_freed_memory
from bertfused.data import DataFolder
from bertfused.run import read_config
from bertfused.training import Place
from unsup.config import UnsupervisedRecipe
from unsup.fit import set_up

FOLDER = REPOSITORY / "runs" / "unsup_pairs" / "en-fr"


class Training:
    """A training by back-translation alone, step by step."""

    def __init__(self, run: Path, data: Path, batch_tokens: int) -> None:
        recipe = read_config(run, UnsupervisedRecipe).model_dump(exclude_unset=True)
        recipe.pop("embeddings", None)
        recipe["objectives"] = {"backtranslation": "1", "denoising": "0", "teacher": "average"}
        recipe["train"] = recipe["train"] | {"batch_tokens": batch_tokens}
        recipe["optim"] = {"ema": 0.99} | recipe["optim"]
        checked = check_recipe(recipe, UnsupervisedRecipe, str(run))
        self.setup = set_up(checked, DataFolder.open(data), run, torch.device("cpu"))
        self.updates = self.setup.steps(
            self.setup.train, batch_tokens=batch_tokens, accumulate=1, seed=1, start=Place()
        )
        self.number = 0

    def share(self, steps: int, clock: Any) -> float:
        """Return the share of generation in the time of some updates."""
        trainer = self.setup.trainer
        trainer.module.take_values()
        begin = clock()
        for _ in range(steps):
            self.number += 1
            trainer.update(self.setup.train, next(self.updates), self.number)
        return trainer.module.take_values()["generation_seconds"] / (clock() - begin)


def main() -> None:
    """Measure, and print the table."""
    from time import perf_counter

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=FOLDER / "resources-bt", help="of unsup train")
    parser.add_argument("--data", type=Path, default=FOLDER / "resources-data")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 2000, 4000])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "unsup_generation")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    args = parser.parse_args()
    keep_freed_memory()  # as every command does
    torch.set_num_threads(1)
    turns, steps = (1, 1) if args.quick else (args.turns, 8)
    trainings = {size: Training(args.run, args.data, size) for size in args.sizes}
    shares: dict[int, list[float]] = {size: [] for size in args.sizes}
    for training in trainings.values():
        training.share(1, perf_counter)  # warms up
    for _ in range(turns):
        for size, training in trainings.items():
            shares[size].append(training.share(steps, perf_counter))
    rows = [
        (f"{size:,}", spread(found), "yes" if sorted(found)[len(found) // 2] <= 0.4 else "**no**")
        for size, found in shares.items()
    ]
    text = [
        "## Unsupervised translation: the cost of translating back",
        "",
        f"Share of a back-translation step, greedy, one core; median and spread over {turns} "
        "turns. Made by `benchmarks/unsup_generation.py`.",
        "",
        table(("batch tokens", "share of the step", "at most 0.4"), rows),
    ]
    publish("unsup-generation", "\n".join(text), {"shares": shares}, args.out, quick=args.quick)


if __name__ == "__main__":
    main()
