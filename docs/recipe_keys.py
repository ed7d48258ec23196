"""Write the tables of all recipe keys into the pages, from the schema itself.

Run it after a change of a key, a default or a description: ``python docs/recipe_keys.py``.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from backtranslation.config import BacktranslationRecipe, MonolingualData, NoiseConfig, StageConfig
from bertfused.config import (
    Corpus,
    DataConfig,
    LoopConfig,
    OptimConfig,
    Recipe,
    RunRecipe,
    SearchConfig,
    TextConfig,
)
from bertgen.config import Corpus as GenCorpus
from bertgen.config import GenRecipe, Task
from docnmt.config import DocumentRecipe
from docnmt.documents import Columns
from unsup.config import DictionaryFile, UnsupervisedData, UnsupervisedRecipe

BEGIN, END = "<!-- begin recipe keys -->", "<!-- end recipe keys -->"
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
NAMES = {bool: "true, false", int: "integer", float: "number", str: "text", Path: "path"}


def values(annotation: Any, bounds: str = "") -> str:
    """Say what a value may be, as it is written in TOML.

    >>> values(tuple[float, float]), values(tuple[bool, ...] | None), values(int | None, "≥ 1")
    ('[number, number]', '[true, false, ...]', 'integer ≥ 1')
    """
    if annotation in NAMES:
        return f"{NAMES[annotation]} {bounds}".strip()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation.__name__.removesuffix("Config").lower()
    kind, parts = get_origin(annotation), [p for p in get_args(annotation) if p is not NoneType]
    if kind is Literal:
        return ", ".join(f'`"{part}"`' for part in parts)
    if kind is Annotated:
        return values(parts[0], bounds)
    if kind is dict:
        return f"table of {values(parts[1])}" if parts[1] is not Any else "table"
    if kind is tuple:
        return f"[{', '.join('...' if part is Ellipsis else values(part) for part in parts)}]"
    return " or ".join(values(part, bounds) for part in parts)


def limits(field: FieldInfo) -> str:
    """Return the bounds of a number."""
    found = [(name, getattr(own, name, None)) for own in field.metadata for name in BOUNDS]
    return ", ".join(f"{BOUNDS[name]} {bound}" for name, bound in found if bound is not None)


def default(field: FieldInfo) -> str:
    """Return a default as it is written in TOML; nothing where a key is off."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value == () or isinstance(value, dict | BaseModel):
        return ""
    if isinstance(value, tuple):
        return f"`{json.dumps(list(value))}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{str(value).lower()}`"


def describe(field: FieldInfo) -> tuple[Any, ...]:
    """Return what a table says of a key."""
    return field.annotation, default(field), limits(field), field.description


def table(model: type[BaseModel], known: type[BaseModel] = BaseModel) -> str:
    """Return the keys of one section as a Markdown table, without those of a known one."""
    lines = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name in known.model_fields and describe(field) == describe(known.model_fields[name]):
            continue
        allowed = values(field.annotation, limits(field))
        meaning = (field.description or "").replace("<", r"\<").replace("*", r"\*")
        is_tag = name == "model" and get_origin(field.annotation) is Literal
        lines.append(
            f"| `{name}` | {'required' if is_tag else default(field)} | {allowed} | {meaning} |"
        )
    return "\n".join(lines)


def sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the models of a section: several where one of its keys decides between them."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in get_args(annotation) for model in sections(part)]


def sections_of(recipe: type[RunRecipe]) -> list[tuple[str, FieldInfo]]:
    """Return the sections of a recipe: what it is about first, then how it is trained."""
    fields = recipe.model_fields.items()
    return sorted(fields, key=lambda own: own[0] in RunRecipe.model_fields)


def tables() -> str:
    """Return the tables of all sections, and of the tables within them."""
    parts = []
    for name, field in sections_of(DocumentRecipe):
        note = " (docnmt only)" if name in ("documents", "context") else ""
        parts.append(f"### [{name}]{note}")
        models = sections(field.annotation)
        for model in models:
            if len(models) > 1:
                kind = model.model_fields["model"].default
                parts.append(f'`model = "{kind}"`: {model.__doc__}')
            parts.append(table(model))
        if name == "data":
            parts += ["A corpus:", table(Corpus)]
        if name == "documents":
            parts += ["Its columns:", table(Columns)]
    return "\n\n".join(parts)


def chain_tables() -> str:
    """Return the tables of what only a chain of back-translation has."""
    parts = ["### [data]", table(MonolingualData, DataConfig)]
    for name, field in BacktranslationRecipe.model_fields.items():
        if name in Recipe.model_fields:
            continue
        for model in sections(field.annotation):
            parts += [f"### [{name}]", table(model)]
            for key, own in model.model_fields.items() if name == "stages" else ():
                (stage,) = sections(own.annotation)
                if stage is not StageConfig:
                    parts += [f"`[stages.{key}]` has besides", table(stage, StageConfig)]
        if name == "stages":
            parts += ["Each stage:", table(StageConfig)]
    return "\n\n".join([*parts, "Noise:", table(NoiseConfig)])


def unsupervised_tables() -> str:
    """Return the tables of what only unsupervised training has."""
    parts = ["### [data]", table(UnsupervisedData, TextConfig)]
    for name, field in UnsupervisedRecipe.model_fields.items():
        if name in Recipe.model_fields:
            continue
        for model in sections(field.annotation):
            parts += [f"### [{name}]", table(model)]
        if name == "words":
            parts += ["A dictionary:", table(DictionaryFile)]
    return "\n\n".join(parts)


def bertgen_tables() -> str:
    """Return the tables of BERTGEN's recipes, less what is as in all others."""
    parts = []
    for name, field in sections_of(GenRecipe):
        (model,) = sections(field.annotation)
        plain = {"optim": OptimConfig, "train": LoopConfig, "search": SearchConfig}.get(name)
        note = "" if plain is None else ", besides or other than in [training](training.md)"
        parts += [f"### [{name}]{note}", table(model, plain or BaseModel)]
        if name == "data":
            parts += ["A task:", table(Task), "A corpus:", table(GenCorpus)]
    return "\n\n".join(parts)


PAGES: dict[Path, Callable[[], str]] = {
    Path(__file__).with_name("training.md"): tables,
    Path(__file__).with_name("backtranslation.md"): chain_tables,
    Path(__file__).with_name("unsupervised.md"): unsupervised_tables,
    Path(__file__).with_name("bertgen.md"): bertgen_tables,
}


def updated(page: str, tables: str) -> str:
    """Return a page with the text between its marks made anew."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for path, of_page in PAGES.items():
        path.write_text(updated(path.read_text(encoding="utf-8"), of_page()), encoding="utf-8")
