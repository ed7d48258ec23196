"""What all commands share: messages on stderr, progress bars on a terminal, exit codes, memory."""

import ctypes
import errno
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bertfused import __version__
from bertfused.errors import UserError

Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing on stderr but warnings.")]


def make_app(name: str, description: str) -> typer.Typer:
    """Make a command with subcommands and ``--version``."""
    app = typer.Typer(
        name=name,
        help=description,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(wanted: bool) -> bool:
        if wanted:
            typer.echo(f"{name} {__version__}")
            raise typer.Exit
        return wanted

    @app.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option("--version", callback=show_version, is_eager=True, help="Show version."),
        ] = False,
    ) -> None:
        pass

    return app


def run_app(app: typer.Typer) -> None:
    """Run a command; a user's mistake is one sentence and exit status 2."""
    keep_freed_memory()
    try:
        app()
    except UserError as error:
        _fail(app, str(error))
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, as with `| head`
        sys.exit(1)
    except OSError as error:
        if error.errno not in _FILE_TROUBLE:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _fail(app, f"{where}{error.strerror}")


def keep_freed_memory() -> None:
    """Let the GNU C library keep what is freed, up to a gigabyte, for the next allocation.

    It gives large blocks back to the system at once, and the next step of a training or a search
    gets the same memory again, zeroed page by page: a tenth of a small model's step. (Blocks of
    32 MiB and more it always gives back.)
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # numbers of <malloc.h>
        mallopt(mmap_threshold, 1 << 25)  # the highest it accepts
        mallopt(trim_threshold, 1 << 30)
        mallopt(top_pad, 1 << 26)


# What goes wrong with files and disks for no fault of the code.
_FILE_TROUBLE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
}


def _fail(app: typer.Typer, sentence: str) -> None:
    print(f"{app.info.name}: error: {sentence}", file=sys.stderr)
    sys.exit(2)


def log_to_stderr(quiet: bool) -> None:
    """Print the log on stderr, only warnings if ``quiet``.

    What a progress bar shows on a terminal stands in lines of its own elsewhere (level DEBUG).
    What else is given the log, such as a run's log.txt, gets all of it in any case.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    shown = logging.INFO if sys.stderr.isatty() else logging.DEBUG
    handler.setLevel(logging.WARNING if quiet else shown)
    logging.getLogger().handlers[:] = [handler]
    for name in ("bertfused", "docnmt", "backtranslation", "unsup", "bertgen"):
        logging.getLogger(name).setLevel(logging.DEBUG)


@contextmanager
def progress(what: str, total: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr if that is a terminal; yields what to call with each bit done."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}" + (f"/{total:,.0f}" if total else "")),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
