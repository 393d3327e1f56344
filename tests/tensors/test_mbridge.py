"""mbridge 0.15.1, another project's conversion between HF and Megatron, as an independent witness of the maps."""

import pytest
import torch
import transformers
from mbridge.core.parallel_states import ParallelStates
from mbridge.models import LLaMABridge, Qwen2Bridge, Qwen3Bridge

from hpc_rl.parallel.layout import Layout
from hpc_rl.tensors.megatron_map import megatron_shard_map, padded_vocab_size
from hpc_rl.tensors.shardmap import ShardMap
from tests.tensors.models import CONFIGS, empty_locals, fill, random_tensors, spec_of

KINDS = {
    "llama": (LLaMABridge, transformers.LlamaConfig),
    "qwen2": (Qwen2Bridge, transformers.Qwen2Config),
    "qwen3": (Qwen3Bridge, transformers.Qwen3Config),
}
# It knows these two norms only under the names that Transformer Engine's fused layers give them.
LOCAL_NORMS = {
    "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
}


def bridge_for(kind: str, tp: int):
    bridge, config = KINDS[kind]
    named = type(
        bridge.__name__, (bridge,), {"_OTHER_MAPPING": LOCAL_NORMS, "_MLP_MAPPING": bridge._MLP_MAPPING | LOCAL_NORMS}
    )
    values = {k: v for k, v in CONFIGS[kind].items() if k != "model_type"}
    states = ParallelStates(tp_size=tp, vpp_size=None)
    out = named(config(**values), torch.float32, states, make_vocab_size_divisible_by=128)
    out.vocab_size, out.padded_vocab_size = values["vocab_size"], padded_vocab_size(values["vocab_size"], tp)
    return out


def local_shape(shard_map: ShardMap, local: str, numel: int) -> tuple[int, ...]:
    all_padding = (0, CONFIGS["llama"]["hidden_size"])
    shape = next((p.shape for p in shard_map.pieces if p.local == local), all_padding)
    return (numel // shape[1], shape[1]) if len(shape) == 2 else (numel,)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_megatron_parameter_is_what_mbridge_makes_of_it(kind: str, tp: int) -> None:
    spec, bridge = spec_of(kind), bridge_for(kind, tp)
    whole = random_tensors(spec)
    for rank in range(tp):
        shard_map = megatron_shard_map(spec, Layout(tp, tp=tp), rank, dtype="float32")
        tensors = empty_locals(shard_map)
        fill(shard_map, tensors, whole)
        for local, value in tensors.items():
            names = bridge._weight_name_mapping_mcore_to_hf(local)
            full = bridge._weight_to_mcore_format(local, [whole[n] for n in names])
            like = torch.empty(local_shape(shard_map, local, value.numel()))
            expected = list(bridge._weight_split_across_tp(local, full, like, tp))[rank]
            assert torch.equal(value.nan_to_num(0.0).view(like.shape), expected), (local, rank)
