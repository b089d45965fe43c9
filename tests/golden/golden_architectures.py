# Copyright 2026 The ExpertMesh Authors
# SPDX-License-Identifier: Apache-2.0
"""Model families as data: tensor names, router rule, and how the block routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers.models.phimoe import modeling_phimoe as phimoe


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
    fp8_tensors: str | None = None  # regular expression
    config_patch: dict = dataclasses.field(default_factory=dict)  # of the written config.json

    def text_config(self, model):
        return model.config.get_text_config()

    def describe_layer(self, model, layer: int) -> dict:
        config = self.text_config(model)

        def at(value):
            if isinstance(value, dict):
                return {k: at(v) for k, v in value.items()}
            return value.replace("{layer}", str(layer)) if isinstance(value, str) else value

        def of_layer(field):  # an int, or a list with one per layer
            value = getattr(config, field)
            return value[layer] if isinstance(value, list) else value

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
            "num_experts": of_layer(self.num_experts),
            "topk": of_layer(self.topk),
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


def route_deepseek(block, x):
    ids, weights = block.gate(x[None])
    return F.linear(x.float(), block.gate.weight.float()), ids, weights


def route_granite(block, x):
    logits = block.router.layer(x).float()
    weights, ids = logits.topk(block.router.top_k, dim=1)
    return logits, ids, torch.softmax(weights, dim=1).type_as(x)


def route_gpt_oss(block, x):
    scores, ids = block.router(x)
    return F.linear(x, block.router.weight, block.router.bias), ids, scores.gather(1, ids)


def route_llama4(block, x):
    scores, logits = block.router(x)
    ids = torch.topk(logits, block.top_k, dim=1)[1]
    return logits, ids, scores.gather(1, ids)


def route_phimoe(block, x):
    logits = block.gate(x)
    weights, ids = phimoe.sparsemixer(logits, block.router_jitter_noise, training=False)
    return logits, ids, weights


def route_hunyuan(block, x):
    logits = block.gate(x[None])
    weights, ids = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), block.top_k, dim=-1)
    return logits, ids, (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)


def route_ernie(block, x):
    logits = block.gate(x.float())
    scores = F.softmax(logits, dim=1, dtype=torch.float)
    ids = torch.topk(block.moe_statics(scores), block.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    weights = weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=block.norm_min)
    return logits, ids, weights.to(x.dtype)


# ---- Layouts ---------------------------------------------------------------------------------------

LAYER = "model.layers.{layer}."


def per_expert(prefix: str, gate: str, up: str, down: str) -> dict:
    names = {"gate": gate, "up": up, "down": down}
    return {"layout": "per_expert"} | {
        key: f"{LAYER}{prefix}.{{expert}}.{name}.weight" for key, name in names.items()
    }


W123 = per_expert("block_sparse_moe.experts", "w1", "w3", "w2")
PROJ = per_expert("mlp.experts", "gate_proj", "up_proj", "down_proj")


def shared_proj(prefix: str, **more) -> dict:
    return {p: f"{LAYER}mlp.{prefix}.{p}_proj.weight" for p in ("gate", "up", "down")} | more


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


def deepseek_v3(name: str, dtype: torch.dtype = torch.bfloat16, cls: str = "DeepseekV3", **kw):
    """DeepSeek-V3's block and names, which GLM-4.5, dots.llm1 and Kimi-K2 share."""
    own = {f.name for f in dataclasses.fields(Fixture)}
    sizes = {k: v for k, v in kw.items() if k not in own}
    config = ATTENTION | dict(
        hidden_size=40,
        intermediate_size=16,
        moe_intermediate_size=20,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_shared_experts=1,
        norm_topk_prob=True,
    )
    if cls == "DeepseekV3":
        config.pop("head_dim")
        config |= MLA | dict(num_key_value_heads=2, scoring_func="sigmoid", topk_method="noaux_tc")
    config |= sizes
    return Fixture(
        **dict(
            name=name,
            model_class=cls + "ForCausalLM",
            config_class=cls + "Config",
            config=config,
            dtype=dtype,
            moe_layers=list(range(config["first_k_dense_replace"], config["num_hidden_layers"])),
            block="model.layers.{layer}.mlp",
            route=route_deepseek,
            layout=PROJ,
            gate=LAYER + "mlp.gate.weight",
            correction_bias=LAYER + "mlp.gate.e_score_correction_bias",
            num_experts="n_routed_experts",
            topk="num_experts_per_tok",
            rule=dict(
                score="sigmoid",
                renormalize=config["norm_topk_prob"],
                renormalize_epsilon=1e-20 if config["norm_topk_prob"] else 0.0,
                scaling_factor=config["routed_scaling_factor"],
                num_groups=config["n_group"],
                topk_groups=config["topk_group"],
                group_score="sum_of_top_two",
            ),
            shared=shared_proj("shared_experts"),
            shared_module="shared_experts",
            float32_tensors="e_score_correction_bias",
        )
        | {k: v for k, v in kw.items() if k in own}
    )


MLA = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)


def deepseek_v2(name: str, dtype: torch.dtype, rule: dict, **sizes) -> Fixture:
    config = (
        ATTENTION
        | MLA
        | dict(
            num_key_value_heads=2,
            intermediate_size=16,
            num_hidden_layers=2,
            first_k_dense_replace=1,
            n_shared_experts=2,
        )
    )
    config.pop("head_dim")
    return Fixture(
        name=name,
        model_class="DeepseekV2ForCausalLM",
        config_class="DeepseekV2Config",
        config=config | sizes,
        dtype=dtype,
        moe_layers=[1],
        block="model.layers.{layer}.mlp",
        route=route_deepseek,
        layout=PROJ,
        gate=LAYER + "mlp.gate.weight",
        num_experts="n_routed_experts",
        topk="num_experts_per_tok",
        rule=dict(score="softmax") | rule,
        shared=shared_proj("shared_experts"),
        shared_module="shared_experts",
    )


def granite(name: str, cls: str, dtype: torch.dtype, shared: bool, **sizes) -> Fixture:
    config = ATTENTION | dict(num_hidden_layers=2) | sizes
    config.pop("head_dim")
    fused = {
        "layout": "fused",
        "transposed": False,
        "interleaved": False,
        "gate_up": LAYER + "block_sparse_moe.input_linear.weight",
        "down": LAYER + "block_sparse_moe.output_linear.weight",
    }
    return Fixture(
        name=name,
        model_class=cls + "ForCausalLM",
        config_class=cls + "Config",
        config=config,
        dtype=dtype,
        moe_layers=[0, 1],
        block="model.layers.{layer}.block_sparse_moe",
        route=route_granite,
        layout=fused,
        gate=LAYER + "block_sparse_moe.router.layer.weight",
        num_experts="num_local_experts",
        topk="num_experts_per_tok",
        rule=dict(score="softmax_over_topk"),
        shared=(
            {
                "gate_up": LAYER + "shared_mlp.input_linear.weight",
                "down": LAYER + "shared_mlp.output_linear.weight",
            }
            if shared
            else None
        ),
        shared_module="shared_mlp" if shared else None,
        shared_beside_block=True,
    )


def qwen_with_shared(name: str, cls: str, dtype: torch.dtype, renormalize: bool, **sizes):
    return Fixture(
        name=name,
        model_class=cls + "ForCausalLM",
        config_class=cls + "Config",
        config=ATTENTION
        | dict(intermediate_size=16, num_hidden_layers=2, norm_topk_prob=renormalize)
        | sizes,
        dtype=dtype,
        moe_layers=[0, 1],
        block="model.layers.{layer}.mlp",
        route=route_softmax(renormalize),
        layout=PROJ,
        gate=LAYER + "mlp.gate.weight",
        num_experts="num_experts",
        topk="num_experts_per_tok",
        rule=dict(score="softmax", renormalize=renormalize),
        shared=shared_proj("shared_expert", output_gate=LAYER + "mlp.shared_expert_gate.weight"),
        shared_module="shared_expert",
    )


LLAMA4_TEXT = ATTENTION | dict(
    hidden_size=48,
    intermediate_size=24,
    intermediate_size_mlp=16,
    num_local_experts=6,
)


def llama4(name: str, prefix: str, dtype: torch.dtype, **rest) -> Fixture:
    layer = prefix + LAYER
    return Fixture(
        name=name,
        dtype=dtype,
        block=prefix + "model.layers.{layer}.feed_forward",
        route=route_llama4,
        layout={
            "layout": "fused",
            "transposed": True,
            "interleaved": False,
            "gate_up": layer + "feed_forward.experts.gate_up_proj",
            "down": layer + "feed_forward.experts.down_proj",
        },
        gate=layer + "feed_forward.router.weight",
        num_experts="num_local_experts",
        topk="num_experts_per_tok",
        rule=dict(score="sigmoid_of_topk"),
        shared={
            p: f"{layer}feed_forward.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")
        },
        shared_module="shared_expert",
        apply_router_weight_on_input=True,
        **rest,
    )
