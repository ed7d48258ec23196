"""The real commands in processes of their own, which a test may kill.

They are forked from a server that has the libraries loaded, so each costs little. Type and shape
checks are off in them, as they are for a user.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests.end_to_end.corpus import MAIN

# What a write does to the disk, as Python's audit events tell it.
_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.copyfile"}

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    [
        "bertfused.fit",
        "docnmt.cli",
        "pytest",
        "torch._dynamo",
        "torch.utils.tensorboard",
        "transformers.models.bert.modeling_bert",
    ]
)


def start(
    log: Path,
    line: str,
    *args: object,
    before: Callable[[], object] | None = None,
    env: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start a command.

    Args:
        log: File that gets its stdout and stderr.
        line: As of ``corpus.command``.
        before: Called in the process before the command.
        env: Environment variables for it.
    """
    words = [*line.split(), *map(str, args)]
    process = _server.Process(target=_child, args=(log, words, before, dict(env or {})))
    process.start()
    return process


def finish(process: BaseProcess, seconds: float = 300) -> int:
    """Wait for the end of a process and return its exit status, -9 if it was killed."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"a process did not end within {seconds} s")
    return process.exitcode


def train(line: str, *args: object) -> None:
    """Run a training that has to succeed, away from the shape checks that slow it down."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        assert finish(start(log, line, *args)) == 0, log.read_text()


def _child(
    log: Path, words: list[str], before: Callable[[], object] | None, env: dict[str, str]
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv = words
    if before is not None:
        before()
    MAIN[words[0]]()


def die_at(number: int, folder: Path) -> None:
    """Make this process kill itself before it opens, makes, renames or removes a file.

    Args:
        number: Which of these, counted from 1 over all in ``folder``.
    """
    left = number

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    _watch(folder, count)


def copy_at_each(folder: Path, copies: Path) -> None:
    """Copy ``folder`` before each of these, as ``copies/0``, ``copies/1``, ...

    A copy holds what a kill at that moment would have left.
    """
    number = 0

    def copy() -> None:
        nonlocal number
        if folder.is_dir():
            shutil.copytree(folder, copies / str(number))
            number += 1

    _watch(folder, copy)


def _watch(folder: Path, act: Callable[[], None]) -> None:
    is_acting = False

    def watch(event: str, args: tuple[object, ...]) -> None:
        nonlocal is_acting
        if is_acting or event not in _EVENTS or str(folder) not in str(args[0]):
            return
        if threading.current_thread() is threading.main_thread():  # TensorBoard has its own
            is_acting = True  # what it does to files is no event
            act()
            is_acting = False

    sys.addaudithook(watch)
