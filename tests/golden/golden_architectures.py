# Copyright 2026 The ExpertMesh Authors
# SPDX-License-Identifier: Apache-2.0
"""The models of make_golden.py, as data: sizes, tensor names, router rule, and how the block routes."""

from __future__ import annotations

import dataclasses
from typing import Callable

import torch
import torch.nn.functional as F


@dataclasses.dataclass
class Fixture:
    name: str
    model_class: str
    config_class: str
    config: dict
    dtype: torch.dtype
    moe_layers: list[int]
    block: str  # path of the MoE block's module
    route: Callable  # (block, hidden_states) -> logits, ids, weights as the block computes them
    layout: dict  # of the routed experts' tensors; names with {layer} and {expert}
    gate: str
    num_experts: str  # names of config fields
    topk: str
    rule: dict
    gate_bias: str | None = None
    correction_bias: str | None = None
    shared: dict | None = None
    shared_module: str | None = None  # attribute of the block (or of the layer, below)
    shared_beside_block: bool = False
    activation: str = "silu"
    apply_router_weight_on_input: bool = False
    float32_tensors: str | None = None  # regular expression
    correction_bias_scale: float = 0.1
    gate_scale: float = 1.5
    max_shard_size: str = "1GB"

    def text_config(self, model):
        return model.config.get_text_config()

    def describe_layer(self, model, layer: int) -> dict:
        config = self.text_config(model)

        def at(value):
            if isinstance(value, dict):
                return {k: at(v) for k, v in value.items()}
            return value.replace("{layer}", str(layer)) if isinstance(value, str) else value

        rule = {
            "score": "softmax",
            "renormalize": False,
            "renormalize_epsilon": 0.0,
            "renormalize_min": 0.0,
            "scaling_factor": 1.0,
            "num_groups": 1,
            "topk_groups": 1,
            "group_score": "max",
        } | self.rule
        rule |= {
            "gate": at(self.gate),
            "gate_bias": at(self.gate_bias),
            "correction_bias": at(self.correction_bias),
        }
        return {
            "index": layer,
            "num_experts": getattr(config, self.num_experts),
            "topk": getattr(config, self.topk),
            "experts": at(self.layout),
            "router": rule,
            "shared": at(self.shared),
        }


# ---- How the blocks route, line by line from their source ------------------------------------------


def route_softmax(renormalize: bool):
    def route(block, x):
        logits = block.gate(x)
        weights, ids = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), block.top_k, dim=-1)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, ids, weights.to(x.dtype)

    return route


# ---- Layouts ---------------------------------------------------------------------------------------

LAYER = "model.layers.{layer}."


def per_expert(prefix: str, gate: str, up: str, down: str) -> dict:
    names = {"gate": gate, "up": up, "down": down}
    return {"layout": "per_expert"} | {
        key: f"{LAYER}{prefix}.{{expert}}.{name}.weight" for key, name in names.items()
    }


W123 = per_expert("block_sparse_moe.experts", "w1", "w3", "w2")
PROJ = per_expert("mlp.experts", "gate_proj", "up_proj", "down_proj")

ATTENTION = dict(
    vocab_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=16,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def mixtral(name: str, dtype: torch.dtype, max_shard_size: str = "1GB", **sizes) -> Fixture:
    return Fixture(
        name=name,
        model_class="MixtralForCausalLM",
        config_class="MixtralConfig",
        config=ATTENTION | dict(num_hidden_layers=2) | sizes,
        dtype=dtype,
        moe_layers=[0, 1],
        block="model.layers.{layer}.block_sparse_moe",
        route=route_softmax(renormalize=True),
        layout=W123,
        gate=LAYER + "block_sparse_moe.gate.weight",
        num_experts="num_local_experts",
        topk="num_experts_per_tok",
        rule=dict(score="softmax", renormalize=True),
        max_shard_size=max_shard_size,
    )


def qwen3_moe(name: str, dtype: torch.dtype, moe_layers: list[int], renormalize: bool, **sizes):
    return Fixture(
        name=name,
        model_class="Qwen3MoeForCausalLM",
        config_class="Qwen3MoeConfig",
        config=ATTENTION | dict(intermediate_size=16, norm_topk_prob=renormalize) | sizes,
        dtype=dtype,
        moe_layers=moe_layers,
        block="model.layers.{layer}.mlp",
        route=route_softmax(renormalize),
        layout=PROJ,
        gate=LAYER + "mlp.gate.weight",
        num_experts="num_experts",
        topk="num_experts_per_tok",
        rule=dict(score="softmax", renormalize=renormalize),
    )


FIXTURES = [
    mixtral(
        "mixtral_float32",
        torch.float32,
        hidden_size=48,
        intermediate_size=40,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    mixtral(
        "mixtral_bfloat16_sharded",
        torch.bfloat16,
        max_shard_size="40KB",
        hidden_size=80,
        intermediate_size=36,
        num_local_experts=6,
        num_experts_per_tok=3,
    ),
    qwen3_moe(
        "qwen3_moe_float32",
        torch.float32,
        moe_layers=[0, 2],
        renormalize=False,
        hidden_size=33,
        moe_intermediate_size=20,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_experts=10,
        num_experts_per_tok=4,
    ),
    qwen3_moe(
        "qwen3_moe_bfloat16",
        torch.bfloat16,
        moe_layers=[1, 3],
        renormalize=True,
        hidden_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        decoder_sparse_step=2,
        num_experts=12,
        num_experts_per_tok=5,
    ),
]
