"""The base of every configuration section."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from moba_train.config.quantities import LARGEST_COUNT


class Section(BaseModel):
    """A section of the recipe: unknown keys and numbers that are not finite or beyond LARGEST_COUNT (whole ones) are
    refused, values never change after loading.

    `true` and `false` are no numbers, and numbers and words such as `yes` are not `true`: pydantic would take them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    called_here: ClassVar[Mapping[str, str]] = {}
    """Keys that other sections have and this one has under another name, for messages."""

    @classmethod
    def fields(cls) -> dict[str, FieldInfo]:
        """Every key that the section may hold."""
        return dict(cls.model_fields)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_other_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        members = {annotation, *get_args(annotation)}
        words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
        if isinstance(value, bool):
            refused = not {bool, Any} & members
        else:  # pydantic takes yes, off and 1 for booleans
            refused = bool in members and value not in words and not (value is None and type(None) in members)
        if refused:
            raise PydanticCustomError("bool_type", "true and false are a type of their own")
        return value

    @field_validator("*")  # after bounds of the field's own, which say more
    @classmethod
    def _refuse_giants(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST_COUNT:
            raise ValueError(f"given {value}; allowed: whole numbers of at most {LARGEST_COUNT:,}")
        return value
