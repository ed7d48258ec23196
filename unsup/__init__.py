"""Unsupervised translation: two monolingual texts, denoising and on-the-fly back-translation."""
