"""What does translating back cost in training? Its share of the time of a back-translation step.

A trained RUN goes on with back-translation only, greedy, by the averaged weights, with batches of
several sizes in turn, and with the sentences of four updates translated at once
(``generate.updates``). The claim, at most 40% of the steps' time, is refuted by the table.
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
CASES = ((1000, 1), (1000, 4), (2000, 1), (2000, 4), (4000, 1))  # batch tokens, updates at once


class Training:
    """A training by back-translation alone, step by step."""

    def __init__(self, run: Path, data: Path, batch_tokens: int, together: int) -> None:
        recipe = read_config(run, UnsupervisedRecipe).model_dump(exclude_unset=True)
        recipe.pop("embeddings", None)
        recipe["objectives"] = {"backtranslation": "1", "denoising": "0", "teacher": "average"}
        recipe["train"] = recipe["train"] | {"batch_tokens": batch_tokens}
        recipe["optim"] = {"ema": 0.99} | recipe["optim"]
        recipe["generate"] = recipe.get("generate", {}) | {"updates": together}
        checked = check_recipe(recipe, UnsupervisedRecipe, str(run))
        self.setup = set_up(checked, DataFolder.open(data), run, torch.device("cpu"))
        self.updates = self.setup.steps(
            self.setup.train, batch_tokens=batch_tokens, accumulate=1, seed=1, start=Place()
        )
        self.number = 0

    def share(self, steps: int, clock: Any) -> float:
        """Return the share of generation in the time of some updates, as many as go together."""
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
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "unsup_generation")
    parser.add_argument("--quick", action="store_true", help="a few seconds, no meaning")
    args = parser.parse_args()
    keep_freed_memory()  # as every command does
    torch.set_num_threads(1)
    turns, steps = (1, 4) if args.quick else (args.turns, 8)
    trainings = {case: Training(args.run, args.data, *case) for case in CASES}
    shares: dict[tuple[int, int], list[float]] = {case: [] for case in CASES}
    rates: dict[tuple[int, int], list[float]] = {case: [] for case in CASES}
    for training in trainings.values():
        training.share(4, perf_counter)  # warms up
    for _ in range(turns):
        for case, training in trainings.items():
            begin = perf_counter()
            shares[case].append(training.share(steps, perf_counter))
            rates[case].append(steps * case[0] / (perf_counter() - begin))
    base = rates[CASES[0]]
    rows = [
        (
            f"{size:,}",
            str(together),
            spread(found),
            "yes" if sorted(found)[len(found) // 2] <= 0.4 else "**no**",
            spread([own / other for own, other in zip(rates[size, together], base, strict=True)]),
        )
        for (size, together), found in shares.items()
    ]
    text = [
        "## Unsupervised translation: the cost of translating back",
        "",
        f"Share of a back-translation step, greedy, one core; median and spread over {turns} "
        "turns. Made by `benchmarks/unsup_generation.py`.",
        "",
        table(
            (
                "batch tokens",
                "updates at once",
                "share of the step",
                "at most 0.4",
                "speed, the first being 1",
            ),
            rows,
        ),
    ]
    values = {"shares": {f"{size} x {n}": found for (size, n), found in shares.items()}}
    publish("unsup-generation", "\n".join(text), values, args.out, quick=args.quick)


if __name__ == "__main__":
    main()
