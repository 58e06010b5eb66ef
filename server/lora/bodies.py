"""The bodies of the requests that load and unload adapters: vLLM's, field by field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LoadAdapterBody(BaseModel):
    """Body of `/v1/load_lora_adapter`."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(description="Name that requests will use as their model.")
    lora_path: str = Field(description="PEFT folder; a relative path starts at --lora-root.")
    load_inplace: bool = Field(False, description="Take the place of the adapter of that name.")
    is_3d_lora_weight: bool = Field(
        False,
        description="Only false: the file's shapes tell whether its experts are stacked.",
        json_schema_extra={"const": False},
    )


class UnloadAdapterBody(BaseModel):
    """Body of `/v1/unload_lora_adapter`."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(description="Name of the adapter.")
    lora_int_id: int | None = Field(None, description="Its id, to remove that one alone.")
