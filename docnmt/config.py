"""The recipe of document-level translation: the core's, with a [documents] section."""

from typing import Any

from pydantic import Field, model_validator

from bertfused.config import Recipe
from docnmt.documents import DocumentsConfig


class DocumentRecipe(Recipe):
    """A recipe whose corpora are documents."""

    documents: DocumentsConfig = Field(
        default=DocumentsConfig(), description="How documents are read, and the context used."
    )

    @model_validator(mode="before")
    @classmethod
    def _segments_are_the_encoders(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Hand documents.segments to the section that the encoder is built from."""
        fusion, documents = values.get("fusion"), values.get("documents")
        if isinstance(fusion, dict) and isinstance(documents, dict) and "segments" in documents:
            return {**values, "fusion": {**fusion, "segments": documents["segments"]}}
        return values
