"""The whole of semi-supervised training, one stage after the other.

::

    OUT/text                         all training text without what stands in dev and test sets
    OUT/baseline-data, OUT/baseline  a model on the real pairs
    OUT/reverse-data, OUT/reverse    one of the other direction
    OUT/bt-generated                 its translations of the monolingual text
    OUT/bt-filtered, OUT/bt-mixed    the pairs that are kept; the recipe of both kinds of pairs
    OUT/bt-data, OUT/bt              a model on these
    OUT/fused                        that one with the encoder fused in
    OUT/control                      that one trained on without the encoder, for the same time

Later rounds add reverse-2, bt-2 and so on. Every stage is what a command does by itself, and
every model has its recipe beside it (OUT/bt.toml). A stage that is done finds that it is, or that
it was made from something else; one that was interrupted goes on. So the chain has no state but
its folders.
"""

import logging
import os
from pathlib import Path
from typing import Any, Literal

from backtranslation import leaks
from backtranslation.config import BacktranslationRecipe, StageName
from backtranslation.engines import check_engine
from backtranslation.equal_time import Costs, encoding_seconds, step_seconds
from backtranslation.filters import (
    FilterReport,
    filter_pairs,
    finished_report,
    made_from_files,
)
from backtranslation.generate import Generation, generate
from backtranslation.mix import mix
from backtranslation.round_trip import forward_scores
from backtranslation.shards import Synthetic, read_generated
from bertfused.checkpoint import WEIGHTS, model_folder, open_encoder
from bertfused.config import (
    Corpus,
    Recipe,
    Section,
    SubwordsConfig,
    flatten,
    load_recipe,
    load_section,
    save_section,
    write_recipe,
)
from bertfused.data import DataFolder
from bertfused.errors import UserError
from bertfused.features import cache_features
from bertfused.fit import set_up, train_run
from bertfused.prepare import prepare
from bertfused.pretrained import load_wordpieces
from bertfused.progress import Bar, no_bar, warn_of
from bertfused.subwords import load_tokenizer
from bertfused.text import make_folder, only_writer, read_lines, sha256_file
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
        UserError: If there is a chain and ``resume`` is not set, or a stage was made from
            something else than the recipe says.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "the chain runs in one process; stop it when it trains a model, and train that in "
            f"several: torchrun -m bertfused train {out}/bt.toml --data {out}/bt-data --out "
            f"{out}/bt --resume"
        )
    path = out / RECIPE
    if path.exists():
        if not resume:
            raise UserError(f"{out} already holds a chain; continue it with --resume")
        check_unchanged(load_recipe(path, BacktranslationRecipe), recipe, out)
    check_parts(recipe, device)
    make_folder(out)
    with only_writer(out):
        chain = Chain(recipe, out.resolve(), device, bar)
        chain.clean()
        write_recipe(path, recipe)
        chain.run()


# The file that says that something was made, or begun, with the keys of a section or with a key;
# they may change until then.
_MADE_WITH = {
    "rounds": "fused/config.toml",
    "data": "baseline-data/data.toml",
    "subwords": "baseline-data/data.toml",
    "model": "baseline/config.toml",
    "optim": "baseline/config.toml",
    "train": "baseline/config.toml",
    "search": "baseline/config.toml",
    "generate": "bt-generated/shards",
    "filter": "bt-filtered/report.json",
    "mix": "bt-mixed/mixed.toml",
    "fusion": "bt-data/data.toml",
    "stages.baseline": "baseline/config.toml",
    "stages.reverse": "reverse/config.toml",
    "stages.bt": "bt/config.toml",
    "stages.fused": "fused/config.toml",
}


def check_unchanged(
    before: BacktranslationRecipe, recipe: BacktranslationRecipe, out: Path
) -> None:
    """Refuse to go on with a recipe that says otherwise how something there was made.

    Files may have other names; the stages know them by their hashes.

    Raises:
        UserError: Naming the key.
    """
    old, new = (flatten(_without_paths(own.model_dump())) for own in (before, recipe))
    for key in sorted(old.keys() | new.keys()):
        made = next(name for part, name in _MADE_WITH.items() if f"{key}.".startswith(f"{part}."))
        if old.get(key) != new.get(key) and (out / made).exists():
            raise UserError(
                f"cannot resume {out}: {key} was {old.get(key)!r} and is {new.get(key)!r}, and "
                f"{Path(made).parent} is made with it; take that folder and those of later "
                "stages away, or give another --out"
            )


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return {str(number): _without_paths(part) for number, part in enumerate(value)}
    return "a file" if isinstance(value, Path) else value


def check_parts(recipe: BacktranslationRecipe, device: str) -> None:
    """Look for what later stages need, before the work of the first.

    Raises:
        UserError: If a reused dictionary lacks the tag, the encoder cannot be loaded, or engine or
            device are not there.
    """
    choose_device(device)
    check_engine(recipe.generate.engine, recipe.generate_search())
    folder, tag = recipe.subwords.reuse, recipe.mix.tag
    known = None if folder is None else load_tokenizer(folder, recipe.data.source).vocabulary.tags
    if known is not None and tag and tag not in known:
        raise UserError(f"mix.tag = {tag!r} is no tag of the dictionary of {folder}")
    if recipe.fusion is not None:
        load_wordpieces(recipe.fusion.encoder, language=recipe.data.source)
    elif "fused" in recipe.stages.model_fields_set:
        _logger.warning("[stages.fused] has no use: the recipe has no [fusion]")


class Chain:
    """One call of ``train_chain``; OUT is an absolute path."""

    def __init__(self, recipe: BacktranslationRecipe, out: Path, device: str, bar: Bar) -> None:
        self.recipe, self.out, self.device, self.bar = recipe, out, device, bar
        self.text = out / "text"

    def clean(self) -> None:
        """Write the training text.

        Raises:
            UserError: If nothing is left of a language's monolingual text.
        """
        with self.bar("lines", None) as advance:
            report = leaks.drop_leaked(self.recipe.data, self.text, advance)
        _logger.info("%s", report.table().to_string())
        for language, files in report.mono.items():
            if not sum(own.lines - own.leaked - own.blank for own in files):
                raise UserError(
                    f"data.mono.{language} has no line of text that is not in a dev or test set"
                )

    def run(self) -> None:
        """Do the other stages in order."""
        recipe, data = self.recipe, self.recipe.data
        self.train_on_real("baseline")
        self.train_on_real("reverse")
        for number in range(1, recipe.rounds + 1):
            if number > 1:
                self.train_on_mixed("reverse", number, _in_round("bt", number - 1), data.source)
            self.train_on_mixed("bt", number, _in_round("reverse", number), data.target)
        if recipe.fusion is not None:
            base = _in_round("bt", recipe.rounds)
            state = self.train_fused(base)
            if recipe.stages.fused.control and state.step:
                self.train_control(base, state)

    def train_on_real(self, stage: Literal["baseline", "reverse"]) -> None:
        """Train a model on the real pairs."""
        recipe = self._recipe(stage)
        self._prepare(stage, recipe)
        self._train(stage, recipe, stage)

    def train_on_mixed(
        self, stage: Literal["reverse", "bt"], number: int, teacher: str, language: str
    ) -> None:
        """Train a model on real and synthetic pairs.

        Args:
            number: The round, from 1.
            teacher: Model that translates the monolingual text.
            language: Of that text.

        Raises:
            UserError: If no synthetic pair is kept.
        """
        name = _in_round(stage, number)
        recipe = self._recipe(stage)
        if stage == "bt":  # the data may serve the fused model too
            recipe = recipe.model_copy(update={"fusion": self.recipe.fusion})
        text = leaks.clean_mono(self.text, language)
        synthetic = self._generate(name, teacher, text)
        self._filter(name, synthetic, text)
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

    def train_fused(self, base: str) -> TrainState:
        """Fuse the encoder into a model."""
        recipe = self._fused_recipe(base)
        cache = self.recipe.stages.fused.cache
        if cache is not None:
            assert recipe.fusion is not None
            data = DataFolder.open(self._data(base))
            encoder = open_encoder(recipe.fusion, languages=data.languages[:1])
            cache_features(data, encoder.to(choose_device(self.device)), cache, self.bar)
        return self._train("fused", recipe, base, init=base)

    def train_control(self, base: str, fused: TrainState) -> None:
        """Train the model that was fused on without the encoder, for the same time."""
        recipe = self._fused_recipe(base)
        length = self._costs(recipe, base).plain_steps(fused.step)
        _logger.info("control: %s steps for the %s of fused", f"{length:,}", f"{fused.step:,}")
        train = recipe.train.model_copy(
            update={
                "max_steps": length,
                "max_epochs": None,
                "max_minutes": None,
                "patience": None,
                # As many models to choose the best from.
                "validate_every": max(recipe.train.validate_every * length // fused.step, 1),
            }
        )
        plain = recipe.model_copy(update={"fusion": None, "train": train})
        self._train("control", plain, base, init=base)

    def _costs(self, fused: Recipe, base: str) -> Costs:
        """Measure, once, what a step of the fused and of the plain model costs."""
        path = self.out / "control" / "costs.json"
        data = DataFolder.open(self._data(base))
        made_from = {
            "data": sha256_file(data.path / "data.toml"),
            "fused": sha256_file(model_folder(self.out / "fused") / WEIGHTS),
        }
        if path.exists():
            costs = load_section(path, Costs)
            if costs.made_from == made_from:
                return costs
        device = choose_device(self.device)
        plain = fused.model_copy(update={"fusion": None})
        recipes = {"fused": fused, "plain": plain}
        setups = {key: set_up(own, data, self.out / base, device) for key, own in recipes.items()}
        seconds = step_seconds(setups)
        encoding = 0.0
        if self.recipe.stages.fused.cache is not None:
            assert fused.fusion is not None
            encoder = open_encoder(fused.fusion, languages=data.languages[:1]).to(device)
            encoding = encoding_seconds(data.split("train"), encoder)
        costs = Costs(
            made_from=made_from,
            fused_step=seconds["fused"],
            plain_step=seconds["plain"],
            encoding=encoding,
        )
        make_folder(path.parent)
        save_section(path, costs)
        return costs

    def _data(self, name: str) -> Path:
        return self.out / f"{name}-data"

    def _recipe(self, stage: StageName) -> Recipe:
        """Return the recipe of a model on the real pairs, all with the baseline's subwords."""
        recipe = self.recipe.stage(stage)
        corpora = leaks.clean_corpora(self.recipe.data, self.text)
        update: dict[str, Section] = {"data": recipe.data.model_copy(update={"train": corpora})}
        if stage != "baseline":
            update |= {"subwords": SubwordsConfig(reuse=self._data("baseline"))}
        recipe = recipe.model_copy(update=update)
        return reversed_recipe(recipe) if stage == "reverse" else recipe

    def _fused_recipe(self, base: str) -> Recipe:
        """Return the recipe of the fused model, on the corpora of the model it begins from."""
        data = load_recipe(self.out / f"{base}.toml", Recipe).data
        return self._recipe("fused").model_copy(update={"data": data})

    def _prepare(self, name: str, recipe: Recipe) -> None:
        _logger.info("%s: data", name)
        is_new = not (self._data(name) / "data.toml").exists()
        with self.bar("pairs", None) as advance:
            report = prepare(recipe, self._data(name), progress=lambda _, pairs: advance(pairs))
        if is_new:
            _logger.info("%s", report)

    def _generate(self, name: str, teacher: str, text: Path) -> Synthetic:
        _logger.info("%s: generated by %s", name, teacher)
        options = self.recipe.generate
        generation = Generation(
            self.out / teacher,
            text,
            self.recipe.generate_search(),
            noise=options.noise,
            engine=options.engine,
            compute_type=options.compute_type,
            batch_tokens=options.batch_tokens,
            device=self.device,
        )
        folder = generation.folder(self.out / f"{name}-generated", options.shards)
        with self.bar("lines", folder.lines) as advance:
            manifest = generate(generation, folder, progress=advance)
        if manifest is not None:
            warn_of(manifest.counts)
        return read_generated(folder.folder, text)

    def _filter(self, name: str, synthetic: Synthetic, text: Path) -> None:
        _logger.info("%s: filtered", name)
        report = self._filtered(self.out / f"{name}-filtered", synthetic, text)
        _logger.info("%s", report)
        if not report.kept:
            reason = max(report.dropped, key=lambda reason: report.dropped[reason], default="empty")
            raise UserError(
                f"{self.out / name}-filtered: none of the {report.pairs:,} synthetic pairs is "
                f"kept; most go for {reason!r}, see [filter] of the recipe"
            )

    def _filtered(self, out: Path, synthetic: Synthetic, text: Path) -> FilterReport:
        """Filter the pairs, unless they are."""
        config = self.recipe.filter
        is_reverse = synthetic.languages[0] != self.recipe.data.source
        if is_reverse:
            source, target = config.target_scripts, config.source_scripts
            scripts = {"source_scripts": source, "target_scripts": target}
            config = config.model_copy(update=scripts)
        run = weights = None
        if config.min_round_trip is not None:
            run = self.out / ("reverse" if is_reverse else "baseline")
            weights = model_folder(run) / WEIGHTS
        made_from = made_from_files(synthetic.text, text, weights)
        if (report := finished_report(out, config, made_from)) is not None:
            return report
        score = None if run is None else forward_scores(run, synthetic.languages, self.device)
        with self.bar("pairs", synthetic.lines) as advance:
            return filter_pairs(
                synthetic.text,
                text,
                out,
                config,
                synthetic.languages,
                score=score,
                made_from=made_from,
                progress=advance,
            )

    def _train(
        self, name: str, recipe: Recipe, data: str, *, init: str | None = None
    ) -> TrainState:
        _logger.info("%s: training", name)
        write_recipe(self.out / f"{name}.toml", recipe)
        with self.bar("steps", recipe.train.max_steps) as advance:
            folder = DataFolder.open(self._data(data))
            return train_run(
                recipe,
                folder,
                self.out / name,
                lambda: map(SourceLine, read_lines(folder.split("dev").source_text)),
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
