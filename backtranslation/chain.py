"""The whole of semi-supervised training, one stage after the other.

::

    OUT/recipe.toml                  what it is made from
    OUT/text                         all training text without what stands in dev and test sets
    OUT/baseline-data, OUT/baseline  a model on the real pairs
    OUT/reverse-data, OUT/reverse    one of the other direction
    OUT/bt-generated                 its translations of the monolingual text
    OUT/bt-filtered, OUT/bt-mixed    the pairs that are kept; the recipe of both kinds of pairs
    OUT/bt-data, OUT/bt              a model on these
    OUT/fused, OUT/control           that one with the encoder fused in; trained on without it

Later rounds add reverse-2, bt-2 and so on. Every stage is what a command does by itself, and
every model has its recipe beside it (OUT/bt.toml). A stage that is done finds that it is, or that
it was made from something else; one that was interrupted goes on. So the chain has no state but
its folders.
"""

import logging
import os
from pathlib import Path

import tomli_w

from backtranslation import leaks
from backtranslation.config import BacktranslationRecipe, StageName
from backtranslation.equal_time import Costs, step_seconds
from backtranslation.filters import FilterReport, filter_pairs
from backtranslation.generate import Generation, generate
from backtranslation.mix import as_toml, mix, read_report
from backtranslation.round_trip import forward_scores
from backtranslation.shards import Synthetic, read_generated
from bertfused.checkpoint import open_encoder
from bertfused.config import Corpus, Recipe, load_recipe
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.features import Bar, cache_features, no_bar
from bertfused.fit import set_up, train_run
from bertfused.prepare import prepare
from bertfused.text import make_folder, only_writer, read_lines, replace_file, sha256_file
from bertfused.training import TrainState
from bertfused.translate import SourceLine, choose_device

_logger = logging.getLogger(__name__)

RECIPE = "recipe.toml"


def model_names(recipe: BacktranslationRecipe) -> list[str]:
    """Return the models of the chain that translate in the recipe's direction, in order."""
    names = ["baseline", *(_in_round("bt", number) for number in range(1, recipe.rounds + 1))]
    if recipe.fusion is not None:
        names += [*(["control"] if recipe.stages.fused.control else []), "fused"]
    return names


def reverse_names(recipe: BacktranslationRecipe) -> list[str]:
    """Return the models of the other direction, in order."""
    return [_in_round("reverse", number) for number in range(1, recipe.rounds + 1)]


def train_chain(
    recipe: BacktranslationRecipe,
    out: Path,
    *,
    resume: bool = False,
    device: str = "auto",
    bar: Bar = no_bar,
) -> None:
    """Run the chain, from where an earlier call was stopped.

    Args:
        resume: Go on in a folder that holds a chain.
        bar: Shows what is done of a stage.

    Raises:
        UserError: If there is a chain and ``resume`` is not set, or some stage was made from
            something else.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"the chain runs in one process; train a model of it in several by torchrun -m "
            f"bertfused train {out}/bt.toml --data {out}/bt-data --out {out}/bt --resume"
        )
    path = out / RECIPE
    if path.exists() and not resume:
        raise UserError(f"{out} already holds a chain; continue it with --resume")
    make_folder(out)
    with only_writer(out):
        with replace_file(path) as handle:
            handle.write(tomli_w.dumps(as_toml(recipe)).encode())
        Chain(recipe, out, device, bar).go()


class Chain:
    """One call of ``train_chain``."""

    def __init__(self, recipe: BacktranslationRecipe, out: Path, device: str, bar: Bar) -> None:
        self.recipe, self.out, self.device, self.bar = recipe, out.resolve(), device, bar
        self.corpora = leaks.clean_corpora(recipe.data, self.out / "text")

    def go(self) -> None:
        """Do what is not done."""
        recipe = self.recipe
        with self.bar("lines", None) as advance:
            report = leaks.drop_leaked(recipe.data, self.out / "text", advance)
        _logger.info("%s", report.table().to_string())
        self.real("baseline")
        self.real("reverse")
        for number in range(1, recipe.rounds + 1):
            if number > 1:
                teacher = _in_round("bt", number - 1)
                self.semi_supervised("reverse", number, teacher, recipe.data.source)
            teacher = _in_round("reverse", number)
            last = self.semi_supervised("bt", number, teacher, recipe.data.target)
        if recipe.fusion is not None:
            self.fused(last)

    def real(self, name: StageName) -> None:
        """Train a model on the real pairs."""
        recipe = self._recipe(name)
        if name != "baseline":
            recipe = self._with_subwords(recipe)
        self._prepare(name, recipe)
        self._train(name, recipe, name)

    def semi_supervised(self, stage: StageName, number: int, teacher: str, real: str) -> str:
        """Train a model on real and synthetic pairs.

        Args:
            teacher: Model that translates the monolingual text.
            real: Language of that text.

        Returns:
            The model's name.
        """
        name = _in_round(stage, number)
        recipe = self._with_subwords(self._recipe(stage))
        is_last = stage == "bt" and number == self.recipe.rounds
        if is_last:  # the data serve the fused model too
            recipe = recipe.model_copy(update={"fusion": self.recipe.fusion})
        synthetic = self._generate(name, teacher, leaks.clean_mono(self.out / "text", real))
        report = self._filter(name, synthetic, leaks.clean_mono(self.out / "text", real))
        if not report.kept:
            raise UserError(f"{self.out / name}-filtered: the filter kept none of its pairs")
        options = self.recipe.mix
        path = mix(
            recipe,
            [self.out / f"{name}-filtered"],
            self.out / f"{name}-mixed",
            upsample=options.upsample,
            tag=options.tag or None,
            noise=options.noise,
        )
        mixed = load_recipe(path, Recipe)
        self._prepare(name, mixed)
        self._train(name, mixed.model_copy(update={"fusion": None}), name)
        return name

    def fused(self, base: str) -> None:
        """Fuse the encoder into a model, and train that on without it for the same time."""
        data = DataFolder.open(self.out / f"{base}-data")
        corpora = load_recipe(self.out / f"{base}.toml", Recipe).data
        recipe = self._with_subwords(self._recipe("fused")).model_copy(update={"data": corpora})
        assert recipe.fusion is not None
        stage = self.recipe.stages.fused
        costs = Costs(self.out / "costs.json")
        if stage.cache is not None:
            with costs.of("cache"):
                cache_features(data, open_encoder(recipe.fusion), stage.cache, self.bar)
        state = self._train("fused", recipe, base, init=base)
        if not stage.control:
            return
        plain = recipe.model_copy(update={"fusion": None})
        if "fused step" not in costs.seconds:
            device = choose_device(self.device)
            init = self.out / base
            setups = {"fused step": set_up(recipe, data, init, device)}
            setups["plain step"] = set_up(plain, data, init, device)
            costs.keep(step_seconds(setups))
        seconds = state.step * costs.seconds["fused step"] + costs.seconds.get("cache", 0.0)
        length = max(round(seconds / costs.seconds["plain step"]), 1)
        _logger.info("control: %s steps for the %s of fused", f"{length:,}", f"{state.step:,}")
        train = recipe.train.model_copy(
            update={
                "max_steps": length,
                "max_epochs": None,
                "max_minutes": None,
                "patience": None,
                # As many models to choose the best from.
                "validate_every": max(recipe.train.validate_every * length // state.step, 1),
            }
        )
        self._train("control", plain.model_copy(update={"train": train}), base, init=base)

    def _recipe(self, stage: StageName) -> Recipe:
        recipe = self.recipe.stage(stage)
        recipe = recipe.model_copy(
            update={"data": recipe.data.model_copy(update={"train": self.corpora})}
        )
        return reversed_recipe(recipe) if stage == "reverse" else recipe

    def _with_subwords(self, recipe: Recipe) -> Recipe:
        subwords = recipe.subwords.model_validate({"reuse": self.out / "baseline-data"})
        return recipe.model_copy(update={"subwords": subwords})

    def _prepare(self, name: str, recipe: Recipe) -> None:
        _logger.info("%s: data", name)
        with self.bar("pairs", None) as advance:
            report = prepare(
                recipe, self.out / f"{name}-data", progress=lambda split, pairs: advance(pairs)
            )
        _logger.info("%s", report)

    def _generate(self, name: str, teacher: str, text: Path) -> Synthetic:
        _logger.info("%s: generated by %s", name, teacher)
        options = self.recipe.generate
        generation = Generation(
            self.out / teacher,
            text,
            options.search or self.recipe.search,
            noise=options.noise,
            engine=options.engine,
            compute_type=options.compute_type,
            batch_tokens=options.batch_tokens,
            device=self.device,
        )
        folder = generation.folder(self.out / f"{name}-generated", options.shards)
        with self.bar("lines", folder.lines) as advance:
            generate(generation, folder, progress=advance)
        return read_generated(folder.folder, text)

    def _filter(self, name: str, synthetic: Synthetic, text: Path) -> FilterReport:
        config, out = self.recipe.filter, self.out / f"{name}-filtered"
        is_reverse = synthetic.languages[0] != self.recipe.data.source
        if is_reverse:
            scripts = (config.target_scripts, config.source_scripts)
            update = dict(zip(("source_scripts", "target_scripts"), scripts, strict=True))
            config = config.model_copy(update=update)
        if (out / leaks.REPORT).exists():
            report = read_report(out)
            made_from = (sha256_file(synthetic.text), sha256_file(text))
            if (report.made_from, report.config) == (made_from, config):
                return report
        _logger.info("%s: filtered", name)
        score = None
        if config.min_round_trip is not None:
            forward = self.out / ("reverse" if is_reverse else "baseline")
            score = forward_scores(forward, synthetic.languages, self.device)
        with self.bar("pairs", synthetic.lines) as advance:
            report = filter_pairs(
                synthetic.text,
                text,
                out,
                config,
                synthetic.languages,
                score=score,
                progress=advance,
            )
        _logger.info("%s", report)
        return report

    def _train(
        self, name: str, recipe: Recipe, data: str, *, init: str | None = None
    ) -> TrainState:
        _logger.info("%s: training", name)
        with replace_file(self.out / f"{name}.toml") as handle:
            handle.write(tomli_w.dumps(as_toml(recipe)).encode())
        with self.bar("steps", recipe.train.max_steps) as advance:
            return train_run(
                recipe,
                DataFolder.open(self.out / f"{data}-data"),
                self.out / name,
                lambda split: map(SourceLine, read_lines(split.source_text)),
                init=None if init is None else self.out / init,
                resume=True,
                device=self.device,
                on_update=lambda state, update: advance(1),
            )


def reversed_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the other direction, on the same pairs."""
    data = recipe.data

    def swapped(corpus: Corpus) -> Corpus:
        return corpus.model_copy(update={"source": corpus.target, "target": corpus.source})

    update = {
        "source": data.target,
        "target": data.source,
        "train": tuple(map(swapped, data.train)),
        "dev": swapped(data.dev),
        "test": tuple(map(swapped, data.test)),
    }
    return recipe.model_copy(update={"data": data.model_copy(update=update)})


def _in_round(stage: str, number: int) -> str:
    return stage if number == 1 else f"{stage}-{number}"
