"""Put real and synthetic pairs together: a recipe that trains on both, and says which is which."""

from collections.abc import Sequence
from pathlib import Path

from backtranslation.config import NoiseConfig
from backtranslation.filters import read_report
from backtranslation.noise import add_noise
from bertfused.config import Corpus, Recipe, write_recipe
from bertfused.errors import UserError
from bertfused.text import make_folder, open_output, read_lines

RECIPE = "mixed.toml"


def mix(
    recipe: Recipe,
    synthetic: Sequence[Path],
    out: Path,
    *,
    upsample: float = 1.0,
    tag: str | None = "<BT>",
    noise: NoiseConfig | None = None,
) -> Path:
    """Write the recipe of a training on the corpora of ``recipe`` and on synthetic ones.

    Args:
        synthetic: Folders that the filter wrote.
        upsample: How often an epoch passes through the real pairs while it passes through the
            synthetic ones once.
        tag: Symbol before synthetic source sentences (Caswell et al., WMT 2019); ``None``: none.
        noise: Of the synthetic source sentences; written to a file of their own.

    Returns:
        The path of the recipe.

    Raises:
        UserError: If the synthetic pairs are of other languages, or of the reverse direction.
    """
    make_folder(out)
    out = out.resolve()
    languages = (recipe.data.source, recipe.data.target)
    corpora = [
        corpus.model_copy(update={"weight": corpus.weight * upsample})
        for corpus in recipe.data.train
    ]
    for number, folder in enumerate(synthetic):
        report = read_report(folder)
        if report.languages != languages:
            raise UserError(
                f"{folder} holds synthetic {report.languages[0]} for real {report.languages[1]}, "
                f"but the recipe trains {languages[0]} to {languages[1]}; its synthetic side must "
                f"be {languages[0]}"
            )
        source, target = (folder.resolve() / f"filtered.{language}" for language in languages)
        if noise is not None and noise.is_any:
            noisy = out / f"noisy.{number}.{languages[0]}"
            with open_output(noisy) as writer:
                for line, text in enumerate(read_lines(source)):
                    writer.write_line(add_noise(text, line, noise))
            source = noisy
        corpora.append(Corpus(source=source, target=target, tag=tag))
    subwords = recipe.subwords
    if tag is not None and subwords.reuse is None and tag not in subwords.tags:
        subwords = subwords.model_copy(update={"tags": (*subwords.tags, tag)})
    data = recipe.data.model_copy(update={"train": tuple(corpora)})
    mixed = recipe.model_copy(update={"data": data, "subwords": subwords})
    path = out / RECIPE
    write_recipe(path, mixed)
    return path
