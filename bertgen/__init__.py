"""BERTGEN: translation, multimodal translation and captioning from one BERT."""
