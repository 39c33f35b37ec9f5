"""The base of every configuration section."""

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A section of the recipe: unknown keys and non-finite numbers are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @classmethod
    def fields(cls) -> dict[str, FieldInfo]:
        """Every key that the section may hold."""
        return dict(cls.model_fields)
