"""Megatron's map against the parameters of real megatron-core models, and against HF tensors fused independently."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpc_rl.errors import UserError
from hpc_rl.parallel.layout import Layout
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.coverage import check_local_coverage, covered_numel
from hpc_rl.tensors.megatron_map import megatron_shard_map, padded_vocab_size
from hpc_rl.tensors.shardmap import view
from tests.tensors.models import empty_locals, fill, random_tensors, spec_of

CUTS = [
    ("llama", Layout(1)),
    ("llama", Layout(4, tp=4)),  # more ranks than KV heads: a group is cut through
    ("llama_tied", Layout(4, tp=2, pp=2)),
    ("llama_tied", Layout(1)),
    ("qwen2", Layout(4, tp=2, pp=2, vpp=2)),
    ("qwen2", Layout(3, pp=3)),  # uneven
    ("qwen3", Layout(4, tp=4)),
    ("qwen3_moe", Layout(4, tp=2, ep=2, etp=1)),
    ("qwen3_moe", Layout(8, tp=2, pp=2, ep=2)),
]


@contextlib.contextmanager
def one_rank_of(layout: Layout, rank: int) -> Iterator[None]:
    """This process as one rank of a job whose other ranks need not exist, for building a model is local."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def pipeline_layout(layout: Layout, num_layers: int) -> list[list[str]]:
    chunks = [c for v in range(layout.vpp) for p in range(layout.pp) for c in [layout.layers_of(p, num_layers)[v]]]
    stages = [["decoder"] * len(c) for c in chunks]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def transformer_config(spec: ModelSpec, layout: Layout) -> TransformerConfig:
    moe = {}
    if spec.num_experts:
        moe = {
            "num_moe_experts": spec.num_experts,
            "moe_ffn_hidden_size": spec.moe_intermediate_size,
            "moe_router_topk": spec.experts_per_token,
            "moe_layer_freq": [int(i in spec.moe_layers) for i in range(spec.num_layers)],
            "moe_token_dispatcher_type": "allgather",  # alltoall wants a CUDA stream
            "add_bias_linear": False,
        }
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=pipeline_layout(layout, spec.num_layers) if layout.pp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        use_cpu_initialization=True,
        **({"add_bias_linear": False} | moe),
    )


def megatron_parameters(spec: ModelSpec, layout: Layout) -> dict[str, torch.nn.Parameter]:
    """Local name -> parameter, of this rank's chunks of a GPTModel."""
    config = transformer_config(spec, layout)
    out = {}
    for v in range(layout.vpp):
        stage = v if layout.vpp > 1 else None
        kw = {"ignore_virtual": stage is None, "vp_stage": stage}
        block = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", qk_l2_norm=False, vp_stage=stage
        )
        model = GPTModel(
            config,
            block,
            vocab_size=padded_vocab_size(spec.vocab_size, layout.tp),
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(**kw),
            post_process=parallel_state.is_pipeline_last_stage(**kw),
            share_embeddings_and_output_weights=spec.tie_embeddings,
            position_embedding_type="rope",
            vp_stage=stage,
        )
        prefix = f"chunk{v}." if layout.vpp > 1 else ""
        out |= {prefix + name: p for name, p in model.named_parameters()}
    return out


@pytest.mark.parametrize(("kind", "layout"), CUTS, ids=str)
def test_names_and_sizes_are_those_of_a_real_gpt_model(
    kind: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It only makes the two copies of a tied embedding equal, through CUDA; names and sizes stand before it runs.
    monkeypatch.setattr(GPTModel, "setup_embeddings_and_output_layer", lambda self: None)
    spec = spec_of(kind)
    for rank in range(layout.world_size):
        with one_rank_of(layout, rank):
            parameters = megatron_parameters(spec, layout)
        check_local_coverage(megatron_shard_map(spec, layout, rank), {n: p.numel() for n, p in parameters.items()})


@pytest.mark.parametrize(("kind", "layout"), CUTS, ids=str)
def test_all_ranks_together_hold_every_element(kind: str, layout: Layout) -> None:
    spec = spec_of(kind)
    boxes: dict[str, list] = {name: [] for name in spec.tensors()}
    for rank in range(layout.world_size):
        for p in megatron_shard_map(spec, layout, rank).pieces:
            boxes[p.name].append((p.start, p.shape))
    for name, shape in spec.tensors().items():
        assert covered_numel(boxes[name]) == torch.Size(shape).numel(), name


def fused_by_hand(spec: ModelSpec, whole: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    """Megatron's fused QKV of layer 0 by reshaping: groups of [query heads, key, value]."""
    q, k, v = (whole[f"model.layers.0.self_attn.{x}_proj.{kind}"] for x in "qkv")
    groups, tail = spec.num_kv_heads, q.shape[1:]
    parts = [t.reshape(groups, -1, *tail) for t in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *tail)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_fused_qkv_equals_reshaping_by_hand(tp: int) -> None:
    spec = spec_of("qwen2")
    whole = random_tensors(spec)
    for rank in range(tp):
        shard_map = megatron_shard_map(spec, Layout(tp, tp=tp), rank)
        tensors = empty_locals(shard_map)
        fill(shard_map, tensors, whole)
        for kind in ("weight", "bias"):
            expected = fused_by_hand(spec, whole, kind).chunk(tp)[rank].reshape(-1)
            assert torch.equal(tensors[f"decoder.layers.0.self_attention.linear_qkv.{kind}"], expected)


def test_row_parallel_gated_and_padded_tensors() -> None:
    spec = spec_of("qwen2")
    whole = random_tensors(spec)
    for rank in range(2):
        shard_map = megatron_shard_map(spec, Layout(2, tp=2), rank)
        tensors = empty_locals(shard_map)
        fill(shard_map, tensors, whole)
        gate, up, down = (whole[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
        fc1 = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        assert torch.equal(tensors["decoder.layers.1.mlp.linear_fc1.weight"], fc1.reshape(-1))
        assert torch.equal(tensors["decoder.layers.1.mlp.linear_fc2.weight"], down.chunk(2, 1)[rank].reshape(-1))
        rows = tensors["output_layer.weight"].view(128, 32)
        real = max(0, min(250 - 128 * rank, 128))
        assert torch.equal(rows[:real], whole["lm_head.weight"][128 * rank : 128 * rank + real])
        assert rows[real:].isnan().all()


def test_critic_has_a_value_head_in_place_of_the_output_layer() -> None:
    spec = spec_of("llama_tied").with_role("critic")
    layout = Layout(2, pp=2)
    last = megatron_shard_map(spec, layout, 1)
    assert spec.tensors()["value_head.weight"] == (1, 32)
    assert "value_head.weight" in {p.local for p in last.pieces}
    assert "output_layer.weight" not in {p.local for p in last.pieces}


@pytest.mark.parametrize(
    ("kind", "changes", "layout", "message"),
    [
        ("llama", {}, Layout(3, tp=3), "num_attention_heads = 8 is not a multiple of tp = 3"),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 6}, Layout(4, tp=4), "num_key_value_heads = 6"),
        ("llama", {"intermediate_size": 50}, Layout(4, tp=4), "intermediate_size = 50"),
        ("llama", {}, Layout(2, ep=2), "ep is 2, but llama has no experts"),
        ("qwen3_moe", {}, Layout(3, ep=3), "num_experts = 4 is not a multiple of ep = 3"),
        ("llama", {}, Layout(8, pp=8), "the model has 4: lower pp"),
    ],
)
def test_a_cut_that_cannot_be_is_named(kind: str, changes: dict, layout: Layout, message: str) -> None:
    with pytest.raises(UserError, match=message):
        megatron_shard_map(spec_of(kind, **changes), layout, 0)


def test_views_write_into_the_parameter() -> None:
    spec = spec_of("llama")
    shard_map = megatron_shard_map(spec, Layout(1), 0)
    piece = next(p for p in shard_map.pieces if p.name == "model.layers.0.mlp.up_proj.weight")
    local = torch.zeros(96, 32)
    view(piece, local).fill_(1)
    assert local[:48].sum() == 0 and local[48:].sum() == 48 * 32
