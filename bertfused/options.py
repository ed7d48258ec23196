"""Options that several commands have, each with its one name and explanation."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertfused.config import InferencePrecision, SearchConfig

SEARCH_PANEL = "Search (what is not given is as in the recipe of the run)"


def search_option(key: str, *, min: int | None = None) -> Any:
    """Make the option of a search setting, explained as the recipe explains it."""
    return typer.Option(
        f"--{key.replace('_', '-')}",
        min=min,
        help=SearchConfig.model_fields[key].description,
        rich_help_panel=SEARCH_PANEL,
    )


RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE.toml", help="All settings; see docs/training.md.")
]
Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder, or a checkpoint or model folder in one.")
]
Data = Annotated[Path, typer.Option("--data", help="DATA folder made by prepare.")]
Out = Annotated[Path, typer.Option("--out", help="Folder to write.")]
Force = Annotated[
    bool, typer.Option("--force", help="Make --out anew, complete or made from something else.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the newest checkpoint in --out; start if there is none."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the recipe, e.g. optim.lr=1e-3; none takes it out; repeatable.",
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one.")
]
Encoder = Annotated[
    str | None,
    typer.Option("--encoder", help="Folder or hub name of the pretrained encoder, if it moved."),
]
EncoderPrecision = Annotated[
    InferencePrecision,
    typer.Option(
        "--encoder-precision",
        help="Of the pretrained encoder; bf16 is faster, and a few translations change.",
    ),
]
BatchTokens = Annotated[
    int,
    typer.Option(
        "--batch-tokens",
        min=1,
        help="Source tokens of a batch, padding included; changes speed and memory only.",
    ),
]
To = Annotated[
    str | None,
    typer.Option("--to", help="Language to translate into, of a model of several directions."),
]
Source = Annotated[
    Path, typer.Option("--source", help="Source text, one sentence a line; .gz and .zst by suffix.")
]
ByPronouns = Annotated[
    str | None,
    typer.Option(
        "--by-pronouns",
        metavar="PIPELINE",
        help="Also print the results of the sentences whose source has a pronoun of the third "
        "person, and of the others; found by a spaCy pipeline with a morphologizer or "
        "attribute_ruler, installed (en_core_web_sm) or in a folder.",
    ),
]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="Ignore case in BLEU and chrF.")]
LongLines = Literal["truncate", "split", "error"]
