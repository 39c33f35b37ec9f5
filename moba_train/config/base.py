"""The base of every configuration section, and numbers with suffixes, such as `128K` and `10B`.

Suffixes have two readings, as in the field's own usage: sequence lengths count in powers of 1024 (`128K` = 131072
tokens), token budgets in powers of 1000 (`1B` = 10**9 tokens).
"""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from moba_train.registry import Registry

SAVED = "saved"
"""Context in which a recipe is read that an earlier version may have saved: it gives every key, so those that are gone
since are left out. Only keys go that did not change what a model computes, or gave it parameters, by which other values
are then refused."""


class Section(BaseModel):
    """A section of the recipe: unknown keys and numbers that are not finite or beyond LARGEST_COUNT (whole ones) are
    refused, values never change after loading.

    `true` and `false` are no numbers, and numbers and words such as `yes` are not `true`: pydantic would take them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    not_here: ClassVar[Mapping[str, str]] = {}
    """Keys that one may expect here, or that earlier versions had, each with a hint for the message that refuses it."""

    @classmethod
    def fields(cls) -> dict[str, FieldInfo]:
        """Every key that the section may hold."""
        return dict(cls.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_former_keys(cls, values: Any, info: ValidationInfo) -> Any:
        if info.context == SAVED and isinstance(values, dict):
            return {key: value for key, value in values.items() if key not in cls.not_here}
        return values

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
            raise PydanticCustomError("bool_type", "true and false are a separate type")
        return value

    @field_validator("*")  # after bounds of the field's own, which say more
    @classmethod
    def _refuse_giants(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST_COUNT:
            raise ValueError(f"given {value}; allowed: whole numbers of at most {LARGEST_COUNT:,}")
        return value


class OpenSection(Section):
    """A section that holds, in addition to its own keys, a section of options for each member of a registry.

    A member's options are its attribute `Options`, a class derived from `Section`, or None for a member that has none.
    Members are imported when they are named.
    """

    model_config = ConfigDict(extra="allow")

    members: ClassVar[Registry[Any]]
    defaults_stand: ClassVar[bool] = False
    """True: a member that is not named has the defaults of its options; False: it has none, and null is allowed."""

    @classmethod
    def fields(cls) -> dict[str, FieldInfo]:
        """The section's own keys, and one for each member. Imports all members."""
        return super().fields() | {name: cls._member_field(name) for name in cls._open_names()}

    @classmethod
    def _open_names(cls) -> list[str]:
        """Members whose options are no key of the section's own. Imports all members."""
        usable = cls.members.usable()
        return [name for name in usable if name not in cls.model_fields and usable[name].Options is not None]

    @classmethod
    def _member_field(cls, name: str) -> FieldInfo:
        options = cls.members[name].Options
        if cls.defaults_stand:
            return FieldInfo(annotation=options, default=options())
        return FieldInfo(annotation=options | None, default=None, description="null: not asked for")

    @model_validator(mode="after")
    def _validate_members(self, info: ValidationInfo) -> Self:
        sections = self.__pydantic_extra__
        assert sections is not None
        errors: list[InitErrorDetails] = []
        for name, value in sections.items():
            if name not in self.members or self.members[name].Options is None:
                errors.append(InitErrorDetails(type="extra_forbidden", loc=(name,), input=value))
            elif value is not None or self.defaults_stand:
                try:
                    sections[name] = self.members[name].Options.model_validate(value, context=info.context)
                except ValidationError as error:
                    errors += [_below(name, details) for details in error.errors(include_url=False)]
        if errors:
            raise ValidationError.from_exception_data(type(self).__name__, errors)
        return self

    @property
    def given_members(self) -> dict[str, Section]:
        """Sections of the members that are given, by name."""
        return {name: options for name, options in (self.__pydantic_extra__ or {}).items() if options is not None}

    def asked_for(self) -> list[tuple[str, Any, Any]]:
        """(name, member, value of its key) of every member that is asked for."""
        settings = ((name, getattr(self, name, None)) for name in self.members)
        return [
            (name, self.members[name], setting)
            for name, setting in settings
            if setting and getattr(setting, "mode", "") != "disabled"
        ]

    def member_problems(self, key: str) -> Iterator[str]:
        """Packages that the members need and that are not installed, each with the command that installs it. `key`: of
        the section."""
        for name, member, setting in self.asked_for():
            if hasattr(member, "problem") and (problem := member.problem(setting)):
                yield f"{key}.{name}: {problem}"

    def options_of(self, name: str) -> Section | None:
        """The options of a member: given, or its defaults where they stand."""
        found = getattr(self, name, None)  # members are attributes as the section's own keys are
        if found is None and self.defaults_stand:
            found = self.members[name].Options()
        assert found is None or isinstance(found, Section)
        return found

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of all keys, one section for each member included."""
        schema = handler(core_schema)
        resolved = handler.resolve_ref_schema(schema)
        resolved["additionalProperties"] = False
        for name in cls._open_names():
            options = handler(cls.members[name].Options.__pydantic_core_schema__)
            null = {"anyOf": [options, {"type": "null"}], "default": None}
            resolved["properties"][name] = options if cls.defaults_stand else null
        return schema


def _below(key: str, details: Any) -> InitErrorDetails:
    """An error of a section as an error of the section above it, where it is called `key`."""
    return InitErrorDetails(
        type=details["type"], loc=(key, *details["loc"]), input=details["input"], ctx=details.get("ctx", {})
    )


_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([KMBT]?)\s*$", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "B": 3, "T": 4}

LARGEST_COUNT = 2**53
"""Largest whole number of a recipe, nine thousand trillions: up to here float64, in which suffixes are read and corpora
are blended, holds every one. Beyond 2**63 they overflow in numpy and torch."""

LONGEST_WAIT_S = 365 * 86400
"""Largest number of seconds that anything waits for; some orders of magnitude more overflow in Python's clocks."""

MOST_SAMPLES = 1_000_000
"""Largest number of samples of an evaluation, and of steps that a spike is compared with."""


def parse_number(value: Any, base: int) -> Any:
    """An int from `value` (int, integral float or text such as "1.5B"), suffixes being powers of `base`.

    Values of other types are returned untouched, for the caller's own validation to refuse.
    Raises ValueError when the text is not a number or not a whole one, and for more than LARGEST_COUNT.
    """
    if isinstance(value, bool):
        raise ValueError(f"given {str(value).lower()}, which is not a number; write e.g. 4096, 128K or 1.5B")
    number = value
    if isinstance(value, str):
        match = _NUMBER.match(value)
        if match is None:
            raise ValueError(f"given {value!r}, which is not a number; write e.g. 4096, 128K or 1.5B")
        digits = match[1].replace("_", "")
        number = float(digits)
        if 0 < number <= LARGEST_COUNT:  # the fraction of 1e999999 would fill the memory
            exact = Fraction(digits) * base ** _POWER[match[2].upper()]
            number = exact.numerator if exact.denominator == 1 else float(exact)
    if isinstance(number, int | float) and number > LARGEST_COUNT:
        raise ValueError(f"given {value!r}; allowed: at most {LARGEST_COUNT:,} tokens")
    if isinstance(number, float) and number.is_integer():
        return int(number)
    if isinstance(value, str) and not isinstance(number, int):
        raise ValueError(f"given {value!r}, which is {number:,} tokens; allowed: a whole number")
    return number


def format_count(number: float, base: int = 1000) -> str:
    """`number` with three significant digits and a suffix, e.g. 1.24B; the digits before the point are all kept."""
    shown = ""
    for suffix in ("", "K", "M", "B", "T"):
        value = number / base ** _POWER[suffix]
        shown = f"{value:.0f}{suffix}" if abs(value) >= 100 else f"{value:.3g}{suffix}"
        if round(abs(value)) < base:
            break
    return shown


def format_duration(seconds: float) -> str:
    """Seconds in the largest unit that they fill, e.g. `3.2 hours`; below 0.1 s one digit, e.g. `0.004 seconds`."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:{'.1f' if seconds >= 0.1 else '.1g'}} seconds"


def _json_schema(minimum: int) -> WithJsonSchema:
    """Schema of what an editor should accept: a whole number, or text with a suffix."""
    text = {"type": "string", "pattern": r"^\s*[0-9][0-9_]*(\.[0-9]+)?([eE]\+?[0-9]+)?\s*[KMBTkmbt]?\s*$"}
    return WithJsonSchema({"anyOf": [{"type": "integer", "minimum": minimum}, text]})


Length = Annotated[
    int,
    BeforeValidator(lambda value: parse_number(value, 1024)),
    Field(ge=1, description="tokens; K, M count in 1024"),
    _json_schema(1),
]
"""A sequence length or batch size in tokens; suffixes count in 1024."""

TokenBudget = Annotated[
    int,
    BeforeValidator(lambda value: parse_number(value, 1000)),
    Field(ge=0, description="tokens; K, M, B, T count in 1000"),
    _json_schema(0),
]
"""A number of training tokens; suffixes count in 1000."""
