"""Plans the cache of a model on GPUs that need not be there."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from radixkv.mem_cache import (
    ConfigError,
    KVCacheConfig,
    KVCacheMemoryError,
    MambaSpec,
    PlanReport,
    plan_kv_cache,
    report_plan,
    specs_from_model_config,
)
from radixkv.mem_cache.planning import AnyKVCacheSpec, BufferOrder, num_mtp_layers
from radixkv.mem_cache.planning.model_config import ModelConfig
from radixkv.mem_cache.sizes import as_size

_PAGE_SIZES: Final = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """A model, and the GPUs that it is to run on.

    Attributes:
        model_config: The content of the model's `config.json`.
        draft_model_config: That of a draft model whose cache shares the pages.
        model_name: What an error calls the first, such as its file.
        draft_model_name: What it calls the second.
        assume_dense: Read a family that is not known as its fields say.
        include_mtp: Count the layers of the models' own heads for multi-token
            prediction too.
        available_bytes: Bytes of each GPU for the cache.
        page_size: Tokens a page.
        dtype: The torch name of the dtype of K and V; None, as the model computes.
        tensor_parallel_size: GPUs that share the heads of each layer.
        pipeline_parallel_size: Stages, which share the layers.
        max_len: Longest request, in tokens; None, as the model says.
        request_len: Length of the requests to count, in tokens; None, as `max_len`.
        chunked_prefill_size: Tokens of a request that one step computes at most.
        checkpoint_size: Tokens between the states that are kept; None keeps none.
        order: Which of pages and layers is outermost in the buffer.
    """

    model_config: Mapping[str, Any]
    draft_model_config: Mapping[str, Any] | None = None
    model_name: str = "the model"
    draft_model_name: str = "the draft model"
    assume_dense: bool = False
    include_mtp: bool = False
    available_bytes: int
    page_size: int = 16
    dtype: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_len: int | None = None
    request_len: int | None = None
    chunked_prefill_size: int = 2048
    checkpoint_size: int | None = None
    order: BufferOrder = "pages_outermost"

    def plan(self) -> list[KVCacheConfig]:
        """Return the config of one GPU of each stage: the ranks of a stage are alike.

        Raises:
            ConfigError: The model cannot be planned, or a number is out of range.
            KVCacheMemoryError: Not even one request of `max_len` fits.
        """
        specs = self._specs(self.model_name, self.model_config)
        drafts = (
            {}
            if self.draft_model_config is None
            else self._specs(self.draft_model_name, self.draft_model_config)
        )
        has_state = any(
            isinstance(spec, MambaSpec) for spec in (*specs.values(), *drafts.values())
        )
        if self.checkpoint_size is not None and not has_state:
            raise ConfigError(
                f"checkpoint-size is for a model with states, got {self.model_name}"
            )
        stages = _stages(specs, self.pipeline_parallel_size)
        if drafts:
            # A draft model is small, and its tokens are wanted where the last layer is,
            # as those of MTP are.
            stages[-1].update((f"draft.{name}", drafts[name]) for name in drafts)
        return plan_kv_cache(
            stages,
            [self.available_bytes] * len(stages),
            max_len=self.longest_request,
            chunked_prefill_size=self.chunked_prefill_size,
            order=self.order,
        )

    def reports(self) -> list[PlanReport]:
        """Return the figures of `plan`, of each stage.

        Raises:
            ConfigError: The model cannot be planned, or a number is out of range.
            KVCacheMemoryError: Not even one request of `max_len` fits.
        """
        length = self.longest_request if self.request_len is None else self.request_len
        return [
            report_plan(
                config,
                request_len=as_size("request-len", length),
                chunked_prefill_size=self.chunked_prefill_size,
            )
            for config in self.plan()
        ]

    @property
    def longest_request(self) -> int:
        """The longest request, in tokens: what the question says, or the model.

        Raises:
            ConfigError: Neither says it.
        """
        if self.max_len is not None:
            return as_size("max-len", self.max_len)
        with _named(self.model_name):
            read = ModelConfig.read(self.model_config, assume_dense=self.assume_dense)
        if read.max_position_embeddings is not None:
            return read.max_position_embeddings
        raise ConfigError(f"max-len must be given: {self.model_name} names none")

    def notes(self) -> list[str]:
        """Return what the plan leaves out, a sentence each.

        Raises:
            ConfigError: A model cannot be planned.
        """
        if self.include_mtp:
            return []
        models = {self.model_name: self.model_config}
        if self.draft_model_config is not None:
            models[self.draft_model_name] = self.draft_model_config
        found: list[str] = []
        for name, config in models.items():
            with _named(name):
                num_layers = num_mtp_layers(config)
            if num_layers:
                one = num_layers == 1
                found.append(
                    f"{name}: {num_layers} layer{'' if one else 's'} for multi-token "
                    "prediction (MTP) not counted; with --include-mtp "
                    f"{'it is' if one else 'they are'}"
                )
        return found

    def roomiest_page_size(self) -> tuple[int, int] | None:
        """Return the page size with which most requests fit, and how many do.

        Returns:
            The page size, a power of two, and the number of requests of `request_len`;
            None, if with no such page size one fits.
        """
        found: list[tuple[int, int]] = []
        for page_size in _PAGE_SIZES:
            try:
                reports = replace(self, page_size=page_size).reports()
            except (ConfigError, KVCacheMemoryError):
                continue  # no divisor of checkpoint_size, or pages too large
            found.append((reports[0].num_requests, -page_size))
        if not found:
            return None
        num_requests, negative = max(found)
        return -negative, num_requests

    def _specs(self, name: str, config: Mapping[str, Any]) -> dict[str, AnyKVCacheSpec]:
        with _named(name):
            return specs_from_model_config(
                config,
                page_size=self.page_size,
                tensor_parallel_size=self.tensor_parallel_size,
                dtype=self.dtype,
                checkpoint_size=self.checkpoint_size,
                assume_dense=self.assume_dense,
                include_mtp=self.include_mtp,
            )


@contextmanager
def _named(model: str) -> Generator[None, None, None]:
    """Say in a refusal which model's config it is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}") from error


def read_model_config(path: Path) -> Mapping[str, Any]:
    """Read a `config.json`, and the `hf_quant_config.json` beside it, if there is one.

    They are read as Python's own `json` does, which writes most of them: with NaN and
    Infinity, and the last of two fields of one name. A byte order mark may come first.

    Args:
        path: The file, or the folder that has it.

    Raises:
        ConfigError: One is no JSON object.
        OSError: The config cannot be read.
    """
    if path.is_dir():
        path /= "config.json"
    config = _read_object(path)
    beside = path.with_name("hf_quant_config.json")
    if path.name == "config.json" and beside.is_file():
        return {"hf_quant_config": _read_object(beside), **config}
    return config


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content: object = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 included
        raise ConfigError(f"{path}: JSON is malformed: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: JSON must be an object, got {type(content).__name__}"
        )
    return cast("dict[str, Any]", content)


def _stages(
    specs: Mapping[str, AnyKVCacheSpec], num_stages: int
) -> list[dict[str, AnyKVCacheSpec]]:
    """Deal layers out to stages, each the next ones: "layers.N.attention" by its N."""
    num_stages = as_size("pipeline-parallel-size", num_stages)
    numbers = {name: int(name.split(".")[1]) for name in specs}
    num_layers = 1 + max(
        (number for name, number in numbers.items() if name.startswith("layers.")),
        default=0,
    )
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline-parallel-size must be <= {num_layers}, the layers of the model, "
            f"got {num_stages}"
        )
    stages: list[dict[str, AnyKVCacheSpec]] = [{} for _ in range(num_stages)]
    for name, spec in specs.items():
        number = min(numbers[name], num_layers - 1)  # MTP goes with the last layer
        stages[number * num_stages // num_layers][name] = spec
    return stages
