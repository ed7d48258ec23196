"""Neural machine translation with a frozen pretrained encoder fused into every layer."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertfused.translate import Translator

__version__ = "0.1.0"
__all__ = ["Translator", "__version__"]


def __getattr__(name: str) -> object:
    """Load what needs torch only when it is asked for."""
    if name == "Translator":
        from bertfused.translate import Translator

        return Translator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
