"""Document-level translation: the previous source sentences in the pretrained encoder's input.

Context-aware models read them without such an encoder, and most of them their translations, too.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docnmt.translate import DocumentTranslator

__all__ = ["DocumentTranslator"]


def __getattr__(name: str) -> object:
    """Load what needs torch only when it is asked for."""
    if name == "DocumentTranslator":
        from docnmt.translate import DocumentTranslator

        return DocumentTranslator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
