"""What every group of settings is: frozen, checked, and documented by the strings below its fields."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Paths = tuple[str, ...]


class Settings(BaseModel):
    """A frozen group of settings; unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
