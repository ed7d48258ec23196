"""Document-level translation: the previous source sentences in the pretrained encoder's input."""
