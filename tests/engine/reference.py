"""The independent truth: Hugging Face models and torch AdamW, one process, float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_rl.batch import Batch, cumulative

VOCAB = 250
STEPS = 3
LR, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 1.0


def hf_model(kind: str, tied: bool = False, num_layers: int = 4, kv_heads: int = 2) -> torch.nn.Module:
    """A tiny random Llama, Qwen2 or Qwen3 whose norms and biases are not trivial."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    torch.manual_seed(7)
    model = model_class(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.05)
            else:
                p.mul_(3.0)
    return model.float()


def hf_config(kind: str, tied: bool = False, num_layers: int = 4, kv_heads: int = 2) -> dict:
    return hf_model(kind, tied, num_layers, kv_heads).config.to_dict()


def batch_of(step: int, num_sequences: int = 8) -> Batch:
    """Ragged sequences of 4 to 20 tokens; responses of 1 to 12, one of them empty; uniform loss weights."""
    g = torch.Generator().manual_seed(100 + step)
    prompts = torch.randint(2, 9, (num_sequences,), generator=g)
    responses = torch.randint(1, 13, (num_sequences,), generator=g)
    responses[1] = 0
    lengths = prompts + responses
    n = int(lengths.sum())
    cu_seqlens = cumulative(lengths)
    position_ids = torch.arange(n) - cu_seqlens[:-1].repeat_interleave(lengths)
    mask = position_ids >= prompts.repeat_interleave(lengths)
    return Batch(
        cu_seqlens,
        {
            "input_ids": torch.randint(0, VOCAB, (n,), generator=g),
            "position_ids": position_ids,
            "response_mask": mask,
            "loss_weights": mask.float() / mask.sum(),
        },
        {"prompt_ids": torch.arange(num_sequences)},
    )


def hf_outputs(model: torch.nn.Module, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log-probs and entropy [N] of the response tokens, 0 elsewhere, one sequence at a time."""
    log_probs, entropy = [], []
    for lo, hi in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        ids = batch["input_ids"][lo:hi]
        log_p = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)
        picked = log_p[:-1].gather(-1, ids[1:, None])[:, 0]
        log_probs.append(torch.cat([picked.new_zeros(1), picked]))
        h = -(log_p.exp() * log_p).sum(-1)[:-1]
        entropy.append(torch.cat([h.new_zeros(1), h]))
    mask = batch["response_mask"]
    return torch.cat(log_probs) * mask, torch.cat(entropy) * mask


@dataclass
class Truth:
    """What every layout must agree with."""

    config: dict
    initial: dict[str, Tensor]
    log_probs: Tensor
    entropy: Tensor
    losses: list[float]
    grad_norms: list[float]
    final: dict[str, Tensor]
    gradient: dict[str, Tensor]


def loss_of(log_probs: Tensor, entropy: Tensor, batch: Batch) -> Tensor:
    """A loss that uses both outputs."""
    return (batch["loss_weights"].to(log_probs.device) * (-log_probs - 0.1 * entropy)).sum()


def truth(kind: str, tied: bool, num_layers: int = 4, kv_heads: int = 2) -> Truth:
    """Three AdamW steps of an HF model."""
    model = hf_model(kind, tied, num_layers, kv_heads)
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        log_probs, entropy = hf_outputs(model, batch_of(0))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    losses, norms, gradient = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = batch_of(step)
        loss = loss_of(*hf_outputs(model, batch), batch)
        loss.backward()
        if step == 0:
            gradient = {k: p.grad.clone() for k, p in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    final = {k: v.clone() for k, v in model.state_dict().items()}
    return Truth(model.config.to_dict(), initial, log_probs, entropy, losses, norms, final, gradient)
