"""Neural machine translation with a frozen pretrained encoder fused into every layer."""

__version__ = "0.1.0"
