"""Where imports and exports are written to."""

from pathlib import Path

from bertfused.errors import UserError


def refuse_existing(out: Path) -> None:
    """Raise UserError unless ``out`` is free: nothing, or an empty folder."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} exists already; give a new folder")
