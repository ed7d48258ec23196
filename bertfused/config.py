"""The recipe: every section a run can be configured with, and how a recipe file is read.

A recipe is TOML; unknown keys are errors. The models here hold numbers and names only, so that
``--help`` and the checking of a recipe need no torch. Builders unpack them into named arguments.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bertfused.errors import UserError
from bertfused.text import replace_file

Activation = Literal["relu", "gelu"]
Order = Literal["parallel", "bert-first", "encoder-first"]
Precision = Literal["auto", "fp32", "bf16"]
InferencePrecision = Literal["fp32", "bf16"]
CacheDtype = Literal["fp16", "fp32"]
Decay = Annotated[float, Field(ge=0, lt=1)]
Tag = Annotated[str, Field(pattern=r"^\S+$")]

# What search.sampling may be.
SAMPLING = r"full|topk:(?P<k>[1-9]\d*)|nucleus:(?P<p>0?\.\d*[1-9]\d*|1(\.0*)?)"


class Section(BaseModel):
    """A frozen part of a recipe that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Corpus(Section):
    """One parallel corpus: two files of the same number of lines."""

    source: Path = Field(description="Source file, one sentence a line; .gz and .zst by suffix.")
    target: Path = Field(description="Target file, line i of which translates line i.")
    docids: Path | None = Field(None, description="File with one document id a line.")
    name: str | None = Field(None, description="Name of a test set.")
    weight: float = Field(
        1.0,
        gt=0,
        description="How often an epoch of training passes through it; of a fraction, a random "
        "part is drawn each epoch.",
    )
    tag: str | None = Field(
        None, description="One of subwords.tags, put before each source sentence in training."
    )


class TextConfig(Section):
    """What every mode says of its text, [data] in a recipe. Paths are relative to the recipe."""

    source: str = Field(description="Source language code, e.g. 'en'.")
    target: str = Field(description="Target language code, e.g. 'de'.")
    test: tuple[Corpus, ...] = Field((), description="Test sets, each with a name.")
    max_tokens: int = Field(
        250, ge=1, description="Training text with more tokens a sentence is dropped and counted."
    )
    max_ratio: float | None = Field(
        None, gt=1, description="Training pairs whose token counts differ more are dropped."
    )
    max_unknown: float = Field(
        0.1, ge=0, le=1, description="Share of unknown tokens above which preparation stops."
    )

    @property
    def splits(self) -> dict[str, tuple[Corpus, ...]]:
        """The corpora of pairs by the name of their split; here the test sets."""
        return {str(corpus.name): (corpus,) for corpus in self.test}

    @property
    def monolingual(self) -> Mapping[str, tuple[Path, ...]]:
        """The files of monolingual text that is prepared, by language."""
        return {}

    @model_validator(mode="after")
    def _tests_have_names(self) -> "TextConfig":
        names = [corpus.name for corpus in self.test]
        if None in names or len(set(names)) < len(names):
            raise ValueError("every entry of data.test needs a name of its own")
        if {"train", "dev"} & set(names):
            raise ValueError("a test set cannot be named 'train' or 'dev'")
        for name in names:
            if not re.fullmatch(r"[^/\\\x00-\x1f]*[^/\\\x00-\x1f.]", name or ""):
                raise ValueError(f"name {name!r} of a test set is to be part of file names")
        return self

    @model_validator(mode="after")
    def _only_training_corpora_are_weighed(self) -> "TextConfig":
        for name, corpora in self.splits.items():
            for corpus in corpora if name != "train" else ():
                if corpus.weight != 1 or corpus.tag is not None:
                    raise ValueError("only corpora of data.train have a weight or a tag")
        return self


class DataConfig(TextConfig):
    """The text, [data] in a recipe of one direction."""

    train: tuple[Corpus, ...] = Field(min_length=1, description="Training corpora.")
    dev: Corpus = Field(description="Development set; nothing in it is ever dropped.")

    @property
    def splits(self) -> dict[str, tuple[Corpus, ...]]:
        """The corpora by the name of their split: train, dev, and the test sets."""
        return {"train": self.train, "dev": (self.dev,), **super().splits}


class SubwordsConfig(Section):
    """The subwords, [subwords] in a recipe."""

    kind: Literal["sentencepiece", "bpe", "words"] = Field(
        "sentencepiece", description="sentencepiece on raw text, subword-nmt BPE, or plain words."
    )
    size: int = Field(
        8000, ge=1, description="Vocabulary size (sentencepiece) or merges (bpe); unused for words."
    )
    shared: bool = Field(True, description="One model and one dictionary for both languages.")
    tags: tuple[Tag, ...] = Field(
        (),
        description="Symbols for the tags of corpora, e.g. '<BT>': no text gives them and no "
        "translation has them.",
    )
    reuse: Path | None = Field(
        None, description="DATA or model folder whose subwords and dictionaries are used as is."
    )


class ModelConfig(Section):
    """The network, [model] in a recipe."""

    encoder_layers: int = Field(6, ge=1, description="Number of encoder layers.")
    decoder_layers: int = Field(6, ge=1, description="Number of decoder layers.")
    model_dim: int = Field(512, ge=1, description="Width of embeddings and layers.")
    ffn_dim: int = Field(1024, ge=1, description="Width inside the feed-forward sub-layers.")
    heads: int = Field(4, ge=1, description="Attention heads; divides model_dim.")
    decoder_heads: int | None = Field(
        None, ge=1, description="Heads of the decoder, if other than the encoder's."
    )
    dropout: float = Field(0.3, ge=0, lt=1, description="Dropout rate of embeddings and branches.")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of attention weights.")
    activation_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout inside the FFN.")
    norm: Literal["post", "pre"] = Field("post", description="Layer norm after or before.")
    activation: Activation = Field("relu", description="Activation of the FFN.")
    positions: Literal["sinusoidal", "learned"] = Field("sinusoidal", description="Positions.")
    max_positions: int = Field(
        1024, ge=1, description="Most tokens of a sentence; with sinusoids only a default limit."
    )
    embedding_norm: bool = Field(False, description="Layer norm after the embeddings.")
    scale_embeddings: bool = Field(True, description="Embeddings are times sqrt(model_dim).")
    share_embeddings: Literal["all", "decoder", "none"] = Field(
        "all", description="Which of source, target and output embeddings are one matrix."
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelConfig":
        for heads in (self.heads, self.decoder_heads or self.heads):
            if self.model_dim % heads:
                raise ValueError(f"model_dim {self.model_dim} is not a multiple of {heads} heads")
        return self


class FusionConfig(Section):
    """The frozen pretrained encoder and how its states enter, [fusion] in a recipe."""

    encoder: str = Field(
        "minilm",
        min_length=1,
        description="Folder or hub name of a transformers encoder, 'minilm' for the packaged "
        "English one, or a RUN folder whose own encoder is used. A folder is looked for beside "
        "the recipe, then from where the command is run.",
    )
    layer: int | Literal["average", "stochastic"] = Field(
        -1,
        description="Layer whose states are used (0 = embeddings, -1 = last), the average of all "
        "layers, or a random one of last_layers in training and their average in decoding.",
    )
    last_layers: int = Field(
        4, ge=1, description="How many layers layer = 'stochastic' draws from."
    )
    max_wordpieces: int | None = Field(
        None, ge=3, description="Longest encoder input; default: the encoder's own limit."
    )
    drop_net: float = Field(
        1.0, ge=0, le=1, description="The paper's p: probability that one branch is dropped."
    )
    drop_net_warmup_steps: int = Field(
        0, ge=0, description="Steps over which drop_net rises linearly from 0."
    )
    mixup: bool = Field(False, description="Weights (u, 1-u) in training instead of drop-net.")
    branch_weights: tuple[float, float] = Field(
        (0.5, 0.5), description="Weights of (own, BERT) attention in evaluation; paper: (1/2, 1/2)."
    )
    start: Literal["function-preserving", "paper"] = Field(
        "function-preserving",
        description="Warm start: BERT's output projection at 0 and own attention scaled up, so "
        "that step 0 computes the NMT exactly; or random BERT attention as in the paper.",
    )
    encoder_attention: bool = Field(True, description="BERT attention in the encoder layers.")
    decoder_attention: bool = Field(True, description="BERT attention in the decoder layers.")
    gates: tuple[bool, ...] | None = Field(
        None, description="One entry for encoder and decoder layer i together; default: all on."
    )
    order: Order = Field("parallel", description="Decoder: beside encoder attention, or stacked.")
    mask_special: bool = Field(False, description="Hide [CLS] and [SEP] positions.")
    segments: bool = Field(True, description="Segment ids 0 for context, 1 for the sentence.")
    finetune: bool = Field(False, description="Train the encoder too (its pooler stays frozen).")

    @model_validator(mode="after")
    def _weights_make_sense(self) -> "FusionConfig":
        if self.start == "function-preserving" and self.branch_weights[0] <= 0:
            raise ValueError("start = 'function-preserving' needs a positive own branch weight")
        if self.mixup and self.drop_net_warmup_steps:
            raise ValueError("drop_net_warmup_steps has no meaning with mixup")
        return self


class OptimConfig(Section):
    """The optimiser, [optim] in a recipe."""

    lr: float = Field(5e-4, gt=0, description="Highest learning rate.")
    warmup_steps: int = Field(4000, ge=0, description="Steps of linear warm-up.")
    warmup_init_lr: float = Field(1e-7, ge=0, description="Learning rate of step 0.")
    schedule: Literal["inverse_sqrt", "linear", "constant"] = Field(
        "inverse_sqrt", description="Decay after warm-up; 'linear' reaches 0 at train.max_steps."
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.98), description="Adam's decay rates.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(1e-4, ge=0, description="Decoupled weight decay.")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="Mass given to wrong tokens.")
    clip_norm: float | None = Field(None, gt=0, description="Largest gradient norm; off if absent.")
    ema: float | None = Field(
        None, gt=0, lt=1, description="Decay a step of the averaged weights used in evaluation."
    )
    new_lr_scale: float = Field(
        1.0,
        gt=0,
        description="Learning rate of newly started tensors (BERT attention, context layers), "
        "times lr.",
    )


class LoopConfig(Section):
    """The training loop of every mode, [train] in a recipe."""

    batch_tokens: int = Field(
        4096, ge=1, description="Padded tokens of a micro-batch on its longest side."
    )
    accumulate: int = Field(1, ge=1, description="Micro-batches a step, over all processes.")
    max_steps: int | None = Field(None, ge=0, description="Stop after this many updates.")
    max_epochs: int | None = Field(None, ge=1, description="Stop after this many passes.")
    max_minutes: float | None = Field(None, gt=0, description="Stop after this much training time.")
    patience: int | None = Field(
        None, ge=1, description="Stop after this many validations without a better one."
    )
    seed: int = Field(1, ge=0, lt=2**63, description="Seed of everything random.")
    precision: Precision = Field("auto", description="bf16 where the processor is fast at it.")
    validate_every: int = Field(1000, ge=1, description="Steps between validations and saves.")
    log_every: int = Field(50, ge=1, description="Steps between logged values.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept.")
    keep_best: int = Field(1, ge=0, description="Best checkpoints kept besides.")

    @model_validator(mode="after")
    def _ends(self) -> "LoopConfig":
        if not (self.max_steps is not None or self.max_epochs or self.max_minutes or self.patience):
            raise ValueError("give max_steps, max_epochs, max_minutes or patience")
        return self


class TrainConfig(LoopConfig):
    """The training loop, [train] in a recipe."""

    validate_bleu: bool = Field(True, description="Translate the dev set at every validation.")
    select: Literal["bleu", "loss"] = Field(
        "loss", description="What the best model is best in; the loss is the smoothed one."
    )

    @model_validator(mode="after")
    def _can_select(self) -> "TrainConfig":
        if self.select == "bleu" and not self.validate_bleu:
            raise ValueError("select = 'bleu' needs validate_bleu = true")
        return self


class SearchConfig(Section):
    """Decoding, [search] in a recipe; the defaults are fairseq's."""

    beam_size: int = Field(5, ge=1, le=10_000, description="Hypotheses kept at each step.")
    length_penalty: float = Field(
        1.0,
        ge=-100,
        le=100,
        description="Score = log-probability / length ** this; higher favours long output.",
    )
    normalize: bool = Field(True, description="If false, score = log-probability.")
    max_length_a: float = Field(
        0.0, ge=0, le=1e6, description="Longest output: a * source tokens + b; this is a."
    )
    max_length_b: int = Field(
        200, ge=0, le=10**6, description="Longest output: a * source tokens + b; this is b."
    )
    min_length: int = Field(1, ge=0, description="At least this many tokens before EOS.")
    no_repeat_ngram: int | None = Field(None, ge=1, description="No n-gram of this size twice.")
    unk_penalty: float = Field(0.0, description="Nats taken from <unk>; below 0 favours it.")
    diverse_groups: int | None = Field(
        None, ge=1, description="Groups of diverse beam search; divides beam_size."
    )
    diverse_strength: float = Field(
        0.5, ge=0, description="Nats a token loses for each use in an earlier group."
    )
    sampling: str | None = Field(
        None, description="full, topk:K or nucleus:P: draw translations, instead of beam search."
    )
    temperature: float = Field(1.0, gt=0, description="Logits are divided by this, > 0.")
    seed: int = Field(1, ge=0, description="Seed of sampling; each line has a stream of its own.")

    @model_validator(mode="after")
    def _check_relations(self) -> "SearchConfig":
        if self.diverse_groups and self.beam_size % self.diverse_groups:
            raise ValueError(
                f"beam_size {self.beam_size} is not a multiple of "
                f"diverse_groups {self.diverse_groups}"
            )
        if self.sampling and self.diverse_groups:
            raise ValueError("sampling and diverse_groups exclude each other")
        if self.sampling and not re.fullmatch(SAMPLING, self.sampling):
            raise ValueError(
                f"sampling is {self.sampling!r}; allowed are full, topk:K with K >= 1 and "
                "nucleus:P with 0 < P <= 1"
            )
        return self


class RunRecipe(Section):
    """What every recipe of a training has.

    Attributes:
        may_change: Pattern of the keys that may differ on ``--resume``: how long or how verbosely a
            run goes on, not what it computes.
    """

    may_change: ClassVar[str] = (
        r"train\.(max_steps|max_epochs|max_minutes|patience|log_every|keep_last|keep_best)|search\..*"
    )
    optim: OptimConfig = OptimConfig()
    train: LoopConfig

    @property
    def weights(self) -> list[float]:
        """How often an epoch passes through each training corpus, where that can be chosen."""
        return []

    @model_validator(mode="after")
    def _linear_has_an_end(self) -> "RunRecipe":
        if self.optim.schedule == "linear" and self.train.max_steps is None:
            raise ValueError("optim.schedule = 'linear' needs train.max_steps")
        return self


class AnyRecipe(RunRecipe):
    """What the recipes of all modes with the BERT-fused Transformer have in common."""

    data: TextConfig
    subwords: SubwordsConfig = SubwordsConfig()
    model: ModelConfig = ModelConfig()
    fusion: FusionConfig | None = None
    search: SearchConfig = SearchConfig()

    @property
    def weights(self) -> list[float]:
        """How often an epoch passes through each training corpus of pairs."""
        return [corpus.weight for corpus in self.data.splits.get("train", ())]


class Recipe(AnyRecipe):
    """A whole recipe of sentence-level translation."""

    data: DataConfig
    train: TrainConfig


RecipeT = TypeVar("RecipeT", bound=Section)


def load_recipe(
    path: Path,
    schema: type[RecipeT],
    overrides: Sequence[str] = (),
    folder: Path | None = None,
) -> RecipeT:
    """Read and check a recipe.

    Args:
        path: A TOML file; relative paths in it are relative to its folder, or to ``folder``.
        schema: The recipe's model.
        overrides: ``"optim.lr=5e-4"``, values as in TOML, bare words as strings.

    Raises:
        UserError: If the file is not TOML, or a key or value is wrong; unknown keys are answered
            with the nearest valid one.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _override(values, override)
    return check_recipe(values, schema, str(path), folder=folder or path.parent)


def check_recipe(
    values: dict[str, Any], schema: type[RecipeT], where: str, folder: Path | None = None
) -> RecipeT:
    """Check the values of a recipe; ``folder`` is what relative paths are relative to."""
    try:
        recipe = schema.model_validate(values)
    except ValidationError as error:
        raise UserError(_explain(error, schema, where)) from error
    return recipe if folder is None else _absolute(recipe, folder)


def write_recipe(path: Path, recipe: Section) -> None:
    """Write a recipe as a file that ``load_recipe`` reads: what was set in it."""
    values = recipe.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    with replace_file(path) as handle:
        handle.write(tomli_w.dumps(values).encode())


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name values that lie within others: optim.lr."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def load_section(path: Path, schema: type[RecipeT]) -> RecipeT:
    """Read a JSON file that ``save_section`` wrote.

    Raises:
        UserError: If it is damaged, or of another version of this program.
    """
    try:
        return schema.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where}: {first['msg']}" if where else first["msg"]
        raise UserError(f"{path} is damaged: {what}") from error


def save_section(path: Path, section: Section) -> None:
    """Write a JSON file beside its final name and rename it."""
    with replace_file(path) as handle:
        handle.write(f"{section.model_dump_json(indent=2)}\n".encode())


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set needs key=value, not {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise UserError(f"--set {override}: {parent} is not a section")
    if value == "none":
        values.pop(last, None)
    else:
        values[last] = value


def _explain(error: ValidationError, schema: type[BaseModel], where: str) -> str:
    errors = error.errors()
    # A key with a typing error is both unknown and missing: the first says more.
    first = next((detail for detail in errors if detail["type"] == "extra_forbidden"), errors[0])
    place = _without_tags(schema, first["loc"]) or [""]
    *parents, name = place
    path = ".".join(map(str, place))
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(name), _keys_at(schema, first["loc"][:-1]), 1, 0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{where}: unknown key {path}{hint}"
    if first["type"] == "missing":
        return f"{where}: {path} is missing"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return f"{where}: {path}.{_explain_tag(schema, first['loc'], first['input'])}"
    messages = [first["msg"].removeprefix("Value error, ")]
    if first["type"] == "value_error":  # of a relation between keys, which names their values
        return f"{where}: {path + ': ' if path else ''}{messages[0]}"
    if isinstance(name, str) and name not in _keys_at(schema, first["loc"][:-1]):
        path = ".".join(map(str, parents))  # one of several types
        messages = [detail["msg"] for detail in errors if detail["loc"][:-1] == first["loc"][:-1]]
    value = repr(first["input"])
    value = value if len(value) < 80 else value[:77] + "..."
    message = " or ".join(message[0].lower() + message[1:] for message in messages)
    message = message.replace("valid tuple", "valid list")  # as TOML has it
    return f"{where}: {path} = {value}: {message}"


def _explain_tag(schema: type[BaseModel], place: Sequence[int | str], value: Any) -> str:
    """Say what is wrong with the key that tells which of several sections this is."""
    sections = _models_at(schema, place)
    key = next(name for name in sections[0].model_fields if _tag(sections[0], name) is not None)
    *others, last = (repr(_tag(section, key)) for section in sections)
    allowed = f"{', '.join(others)} or {last}"
    if key not in value:
        near = difflib.get_close_matches(key, value, 1)
        hint = f" (did you mean it by {near[0]!r}?)" if near else ""
        return f"{key} is missing{hint}; it is {allowed}"
    return f"{key} = {value[key]!r}: input should be {allowed}"


def _keys_at(schema: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """Return the valid keys of the section at a place."""
    return [key for section in _models_at(schema, place)[:1] for key in section.model_fields]


def _without_tags(schema: type[BaseModel], place: Sequence[int | str]) -> list[int | str]:
    """Leave of a place what stands in the recipe: not which of several sections one was taken for.

    (pydantic names that one's tag before the key in it.)
    """
    return [
        part
        for number, part in enumerate(place)
        if not any(
            part == _tag(section, key)
            for section in _models_at(schema, place[:number])
            for key in section.model_fields
        )
    ]


def _models_at(schema: type[BaseModel], place: Sequence[int | str]) -> list[type[BaseModel]]:
    """Return the sections that may stand at a place; none if there is no section."""
    sections = [schema]
    for part in place:
        chosen = [
            section
            for section in sections
            for key in section.model_fields
            if _tag(section, key) == part
        ]
        fields = [
            section.model_fields[part] for section in sections if part in section.model_fields
        ]
        if chosen:
            sections = chosen
        elif not isinstance(part, int):
            sections = [section for field in fields for section in _models_in(field.annotation)]
    return sections


def _tag(section: type[BaseModel], key: str) -> str | None:
    """Return the only value that a key may have, if that is a word."""
    values = get_args(section.model_fields[key].annotation)
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _absolute(section: RecipeT, folder: Path) -> RecipeT:
    """Resolve every relative path of a section, and of the sections in it."""

    def resolve(value: Any) -> Any:
        if isinstance(value, Path):
            return Path(folder, value).resolve()
        if isinstance(value, Section):
            return _absolute(value, folder)
        if isinstance(value, tuple):
            parts = tuple(resolve(part) for part in value)
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
        if isinstance(value, dict):
            changed = {key: resolve(part) for key, part in value.items()}
            return value if all(changed[key] is value[key] for key in value) else changed
        return value

    resolved = {name: resolve(value) for name, value in section}
    if isinstance(resolved.get("encoder"), str):  # of whatever section
        resolved["encoder"] = _encoder_place(resolved["encoder"], folder)
    changed = {
        name: value for name, value in resolved.items() if value is not getattr(section, name)
    }
    # What was left to its default stays known as such.
    return section.model_copy(update=changed) if changed else section


def _encoder_place(name: str, folder: Path) -> str:
    """Resolve the name of an encoder if it is that of a folder: beside the recipe, or from here."""
    places = () if name == "minilm" else (Path(folder, name), Path(name))
    return next((str(place.resolve()) for place in places if place.is_dir()), name)
