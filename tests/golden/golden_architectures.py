# Copyright 2026 The ExpertMesh Authors
# SPDX-License-Identifier: Apache-2.0
"""The models of make_golden.py, as data: sizes, tensor names, router rule, and how the block routes."""

from __future__ import annotations

import dataclasses
from typing import Callable

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
    config = ATTENTION | MLA | dict(
        num_key_value_heads=2,
        intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_shared_experts=2,
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
        shared={
            "gate_up": LAYER + "shared_mlp.input_linear.weight",
            "down": LAYER + "shared_mlp.output_linear.weight",
        }
        if shared
        else None,
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
    qwen_with_shared(
        "qwen2_moe",
        "Qwen2Moe",
        torch.bfloat16,
        renormalize=False,
        hidden_size=40,
        head_dim=20,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        num_experts=8,
        num_experts_per_tok=3,
    ),
    qwen_with_shared(
        "qwen3_next",
        "Qwen3Next",
        torch.bfloat16,
        renormalize=True,
        hidden_size=36,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=16,
        num_experts=20,
        num_experts_per_tok=9,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=2,
    ),
    dataclasses.replace(
        qwen3_moe(
            "olmoe",
            torch.float16,
            moe_layers=[0, 1],
            renormalize=False,
            hidden_size=48,
            num_hidden_layers=2,
            num_experts=8,
            num_experts_per_tok=4,
        ),
        model_class="OlmoeForCausalLM",
        config_class="OlmoeConfig",
    ),
    deepseek_v2(
        "deepseek_v2",
        torch.bfloat16,
        hidden_size=40,
        moe_intermediate_size=20,
        n_routed_experts=12,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
        rule=dict(num_groups=4, topk_groups=2, group_score="max", scaling_factor=16.0),
    ),
    deepseek_v2(
        "deepseek_v2_lite",
        torch.float32,
        hidden_size=33,
        moe_intermediate_size=18,
        n_routed_experts=8,
        num_experts_per_tok=3,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        rule=dict(),
    ),
    deepseek_v3(
        "deepseek_v3",
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    deepseek_v3(
        "kimi_k2",
        n_routed_experts=14,
        num_experts_per_tok=5,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        config_patch=dict(model_type="kimi_k2"),
    ),
    deepseek_v3(
        "glm4_moe",
        cls="Glm4Moe",
        hidden_size=48,
        n_routed_experts=10,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.5,
    ),
    deepseek_v3(
        "dots1",
        cls="Dots1",
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
        num_hidden_layers=3,
        routed_scaling_factor=2.5,
        float32_tensors=None,
    ),
    Fixture(
        name="ernie4_5_moe",
        model_class="Ernie4_5_MoeForCausalLM",
        config_class="Ernie4_5_MoeConfig",
        config=ATTENTION
        | dict(
            hidden_size=40,
            intermediate_size=16,
            moe_intermediate_size=16,
            num_hidden_layers=3,
            moe_num_experts=12,
            moe_k=4,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
        ),
        dtype=torch.bfloat16,
        moe_layers=[1, 2],
        block="model.layers.{layer}.mlp",
        route=route_ernie,
        layout=PROJ,
        gate=LAYER + "mlp.gate.weight",
        correction_bias=LAYER + "mlp.moe_statics.e_score_correction_bias",
        num_experts="moe_num_experts",
        topk="moe_k",
        rule=dict(score="softmax", renormalize=True, renormalize_min=1e-12),
        shared=shared_proj("shared_experts"),
        shared_module="shared_experts",
        float32_tensors=r"mlp\.gate\.weight|moe_statics",
        correction_bias_scale=0.03,
    ),
    Fixture(
        name="hunyuan_v1_moe",
        model_class="HunYuanMoEV1ForCausalLM",
        config_class="HunYuanMoEV1Config",
        config=ATTENTION
        | dict(
            hidden_size=48,
            intermediate_size=20,
            num_hidden_layers=2,
            num_experts=7,
            moe_topk=[2, 3],
        ),
        dtype=torch.bfloat16,
        moe_layers=[0, 1],
        block="model.layers.{layer}.mlp",
        route=route_hunyuan,
        layout=PROJ,
        gate=LAYER + "mlp.gate.wg.weight",
        num_experts="num_experts",
        topk="moe_topk",
        rule=dict(score="softmax", renormalize=True),
        shared=shared_proj("shared_mlp"),
        shared_module="shared_mlp",
        float32_tensors=r"gate\.wg",
    ),
    dataclasses.replace(
        mixtral(
            "phimoe",
            torch.bfloat16,
            hidden_size=40,
            intermediate_size=28,
            num_local_experts=8,
            num_experts_per_tok=2,
            router_jitter_noise=0.1,
        ),
        model_class="PhimoeForCausalLM",
        config_class="PhimoeConfig",
        route=route_phimoe,
        rule=dict(score="sparse_mixer", sparse_mixer_jitter=0.1),
    ),
    dataclasses.replace(
        mixtral(
            "minimax",
            torch.bfloat16,
            hidden_size=44,
            intermediate_size=20,
            num_local_experts=9,
            num_experts_per_tok=2,
            layer_types=["linear_attention", "full_attention"],
            block_size=4,
        ),
        model_class="MiniMaxForCausalLM",
        config_class="MiniMaxConfig",
    ),
    granite(
        "granitemoe",
        "GraniteMoe",
        torch.bfloat16,
        shared=False,
        hidden_size=40,
        intermediate_size=20,
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
    granite(
        "granitemoeshared",
        "GraniteMoeShared",
        torch.float32,
        shared=True,
        hidden_size=32,
        intermediate_size=12,
        shared_intermediate_size=20,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
    llama4(
        "llama4",
        "language_model.",
        torch.bfloat16,
        model_class="Llama4ForConditionalGeneration",
        config_class="Llama4Config",
        config=dict(
            text_config=LLAMA4_TEXT
            | dict(num_hidden_layers=4, interleave_moe_layer_step=2, num_experts_per_tok=1),
            vision_config=dict(
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                intermediate_size=8,
                vision_output_dim=8,
                image_size=28,
                projector_input_dim=8,
                projector_output_dim=8,
            ),
        ),
        moe_layers=[1, 3],
    ),
    llama4(
        "llama4_text",
        "",
        torch.float32,
        model_class="Llama4ForCausalLM",
        config_class="Llama4TextConfig",
        config=LLAMA4_TEXT | dict(num_hidden_layers=1, num_experts_per_tok=2, hidden_size=36),
        moe_layers=[0],
    ),
    Fixture(
        name="gpt_oss",
        model_class="GptOssForCausalLM",
        config_class="GptOssConfig",
        config=ATTENTION
        | dict(
            hidden_size=48,
            intermediate_size=20,
            num_hidden_layers=2,
            num_local_experts=8,
            num_experts_per_tok=4,
            swiglu_limit=7.0,
        ),
        dtype=torch.bfloat16,
        moe_layers=[0, 1],
        block="model.layers.{layer}.mlp",
        route=route_gpt_oss,
        layout={
            "layout": "fused",
            "transposed": True,
            "interleaved": True,
            "gate_up": LAYER + "mlp.experts.gate_up_proj",
            "gate_up_bias": LAYER + "mlp.experts.gate_up_proj_bias",
            "down": LAYER + "mlp.experts.down_proj",
            "down_bias": LAYER + "mlp.experts.down_proj_bias",
        },
        gate=LAYER + "mlp.router.weight",
        gate_bias=LAYER + "mlp.router.bias",
        num_experts="num_local_experts",
        topk="num_experts_per_tok",
        rule=dict(score="softmax_over_topk"),
        activation="clamped_swiglu",
        gate_scale=4.0,  # so that some gates and ups pass the clamp
    ),
]
