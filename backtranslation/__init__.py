"""Back-translation: synthetic pairs from monolingual text, and training on the mix."""
