"""One frozen model in this process, for the Python API: found, loaded and closed again. One rank, no launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch import distributed as dist

from hpc_rl.batch import Batch, cumulative
from hpc_rl.build import choose_device
from hpc_rl.config import Config
from hpc_rl.data.tokenizer import load_tokenizer
from hpc_rl.engine.megatron import MegatronEngine
from hpc_rl.errors import UserError
from hpc_rl.export import Source, has_tokenizer, open_source
from hpc_rl.parallel import state as parallel_state
from hpc_rl.reshard.export import export_from_ranks
from hpc_rl.tensors.canonical import VALUE_HEAD, ModelSpec
from hpc_rl.tensors.hf import HFDirectory, check_names, load_into, open_hf
from hpc_rl.tensors.hf_export import files_of
from hpc_rl.tensors.shardmap import view
from launch.env import detect, export_torch_env

Role = Literal["actor", "critic"]
Text = str | Sequence[int]  # of a sequence: text, or token ids
M = TypeVar("M", bound="Model")
T = TypeVar("T")
_READ_BYTES = 1 << 30  # of a checkpoint's whole tensors in memory at once
_open_models = 0  # in this process
_joined_here = False  # the process group was made for them, and ends with the last one


@dataclass
class LoadedModel:
    """A model's weights in a Megatron engine. ``folder``: of config.json, and of the tokenizer if there is one."""

    engine: MegatronEngine
    hf_config: Mapping[str, Any]
    folder: Path
    config: Config
    is_closed: bool = False

    @staticmethod
    def load(path: str | Path, role: Role, dtype: str | None, device: str) -> LoadedModel:
        """Loads an HF directory, a checkpoint, or a run's newest checkpoint.

        Raises: UserError for what is missing or does not fit, or in a process that a launcher started.
        """
        source = _open(Path(path), role)
        spec = source.spec(role) if isinstance(source, HFDirectory) else source.spec
        folder = source.path if isinstance(source, HFDirectory) else source.folder
        stored = spec.dtype if isinstance(source, HFDirectory) else source.dtype
        hf_config = source.config if isinstance(source, HFDirectory) else source.hf_config
        dtype = dtype or (stored if stored == "float32" else "bfloat16")
        model = {"path": str(folder), "dtype": dtype}
        config = configured(Config, {"model": model, "launch": {"device": device}})
        loaded = LoadedModel(_frozen_engine(role, spec, config), hf_config, folder, config)
        try:
            loaded._fill(source)
        except BaseException:
            loaded.close()
            raise
        return loaded

    def _fill(self, source: HFDirectory | Source) -> None:
        shard_map, tensors = self.engine.shard_map()
        if isinstance(source, HFDirectory):
            check_names(source, self.engine.spec)
            load_into(shard_map, tensors, source)
            return
        for local in shard_map.padding:
            tensors[local].zero_()
        for names in files_of(source.spec, source.dtype, _READ_BYTES).values():
            whole = source.read(names)
            for piece in (p for p in shard_map.pieces if p.name in whole):
                box = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
                view(piece, tensors[piece.local]).copy_(whole[piece.name][box])

    @cached_property
    def tokenizer(self) -> Any:
        """The HF tokenizer. Raises UserError if the model's directory has none."""
        return load_tokenizer(self.config)

    def token_ids(self, sequence: str | Sequence[int]) -> list[int]:
        """Ids of a text, with the tokenizer's leading special tokens; ids as they are."""
        if isinstance(sequence, str):
            from hpc_rl.data.prompts import check_characters, leading_special_tokens

            check_characters("a sequence", sequence)
            tokenizer = self.tokenizer
            encoded = tokenizer(sequence, add_special_tokens=False)["input_ids"]
            return [*leading_special_tokens(tokenizer), *encoded]
        return [int(token) for token in sequence]

    def forward(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[Tensor]]:
        """The engine's outputs for every token but the first: name -> float32 [length] for each sequence."""
        for index, ids in enumerate(sequences):
            if not ids:
                raise UserError(f"sequences[{index}] has no token: leave it out")
            if min(ids) < 0 or max(ids) >= self.engine.spec.vocab_size:
                raise UserError(
                    f"sequences[{index}] has a token id outside 0 .. {self.engine.spec.vocab_size - 1}, the model's "
                    "vocabulary: use the model's own tokenizer"
                )
        lengths = torch.tensor([len(ids) for ids in sequences], dtype=torch.int64)
        cu_seqlens = cumulative(lengths)
        positions = torch.arange(int(cu_seqlens[-1])) - cu_seqlens[:-1].repeat_interleave(lengths)
        flat = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
        batch = Batch(cu_seqlens, {"input_ids": flat, "position_ids": positions, "response_mask": positions > 0})
        self.check_open()
        outputs = self.engine.forward(batch)
        return {name: list(values.split(lengths.tolist())) for name, values in outputs.items()}

    def check_open(self) -> None:
        """Refuses a model that was closed. Raises UserError."""
        if self.is_closed:
            raise UserError(f"the model of {self.folder} was closed: load it again, or use it within its with block")

    def save(self, out: str | Path, dtype: str | None) -> None:
        """Writes an HF directory."""
        self.check_open()
        tokenizer = self.folder if has_tokenizer(self.folder) else None
        dtype = dtype or self.config.model.dtype
        export_from_ranks(out, self.engine.spec, self.engine.shard_map(), self.hf_config, dtype, tokenizer)

    def close(self) -> None:
        """Frees the model; the last one also leaves the process group that was made for them. Twice is once."""
        global _open_models, _joined_here
        if self.is_closed:
            return
        self.is_closed = True
        self.engine.close()
        _open_models -= 1
        if _open_models == 0 and _joined_here:
            parallel_state.destroy()
            _joined_here = False


def configured(kind: type[T], values: Mapping[str, Any]) -> T:
    """A configuration class with some of its values set. Raises UserError for a value out of its range."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        detail = error.errors()[0]
        name = next(part for part in reversed(detail["loc"]) if isinstance(part, str))
        raise UserError(f"{name} = {detail['input']!r}: {detail['msg']}") from None


def _open(path: Path, role: Role) -> HFDirectory | Source:
    is_run = (path / "manifest.json").is_file() or (path / "checkpoints").is_dir()
    if is_run or path.name == "checkpoints":
        return open_source(path, role)
    if not path.is_dir():
        raise UserError(
            f"{path}: no such directory (seen from {Path.cwd()}): give an HF directory, a run directory or a checkpoint"
        )
    source = open_hf(path)
    if role == "critic" and VALUE_HEAD not in source.stored:
        raise UserError(
            f"{path}: holds no value head ({VALUE_HEAD}, or score.weight of one label), so it is no critic: give a "
            "critic's export, a run with a critic, or a sequence classifier"
        )
    return source


def _frozen_engine(role: Role, spec: ModelSpec, config: Config) -> MegatronEngine:
    global _open_models, _joined_here
    info = detect()
    if info.world_size > 1:
        raise UserError(
            f"this process is rank {info.rank} of {info.world_size}, but a model of the Python API lives in one "
            "process: start the script without a launcher"
        )
    device = choose_device(config, info)
    was_joined = dist.is_initialized()
    export_torch_env(info)
    state = parallel_state.initialize(config, device)
    _joined_here = _joined_here or not was_joined
    _open_models += 1
    return MegatronEngine(role, spec, config, state, optimizer=None)


class Model:
    """What actor and critic share. Use it in a ``with`` block, or call `close`."""

    role: Role = "actor"

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def save_pretrained(self, out: str | Path, dtype: str | None = None) -> None:
        """Writes an HF directory: safetensors, config.json, tokenizer.

        Args:
            out: directory to make; must not exist.
            dtype: ``float32``, ``bfloat16`` or ``float16``; None: the model's.

        Raises:
            UserError: ``out`` exists.
        """
        self._loaded.save(out, dtype)

    def token_ids(self, text: str) -> list[int]:
        """The ids of a text as `log_probs` and `values` take them, leading special tokens included."""
        return self._loaded.token_ids(text)

    def _outputs(self, sequences: Sequence[Text], name: str) -> list[Tensor]:
        check_list(sequences, "sequences")
        if not len(sequences):
            return []
        return self._loaded.forward([self._loaded.token_ids(sequence) for sequence in sequences])[name]

    def close(self) -> None:
        """Frees the model."""
        self._loaded.close()

    def __enter__(self: M) -> M:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_list(values: Any, name: str) -> None:
    if isinstance(values, str | Mapping) or (len(values) and isinstance(values[0], Mapping)):
        raise UserError(f"{name} must be a list with one entry each, for example {name}=[...]: put it in a list")
