"""The tiny models of models.py: their shapes and settings."""

import torch

LENGTHS = [1, 2, 31, 33, 70]
PROMPT = 5

# No padding token, whose embedding would get no gradient.
BASE = dict(vocab_size=131, num_hidden_layers=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
            pad_token_id=None, attention_dropout=0.0)
# The vision tower that gemma3's wrapper has, and that no row of text reaches.
SIGLIP = dict(hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2, image_size=8,
              patch_size=4, vision_use_head=False)

# name: (config class, model class, config, dtype on disk, shard size, spelling of config.json)
MODELS = {
    "llama2": ("LlamaConfig", "LlamaForCausalLM", dict(
        hidden_size=48, intermediate_size=60, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0), tie_word_embeddings=False,
    ), torch.float32, None, 4),
    "llama3": ("LlamaConfig", "LlamaForCausalLM", dict(
        hidden_size=40, intermediate_size=51, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0,
                             high_freq_factor=4.0, original_max_position_embeddings=32),
    ), torch.float32, "45KB", 5),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(
        hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, sliding_window=7,
        head_dim=8, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=1000.0),
    ), torch.bfloat16, "25KB", 5),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", dict(
        hidden_size=36, intermediate_size=44, num_attention_heads=3, num_key_value_heads=1, use_sliding_window=True,
        sliding_window=9, max_window_layers=1, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=10000.0),
    ), torch.float32, None, 4),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(
        hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
        tie_word_embeddings=False,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32),
    ), torch.float16, None, 5),
    "reward": ("LlamaConfig", "LlamaForSequenceClassification", dict(
        hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, num_labels=1,
        tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ), torch.float32, None, 5),
    "reward-qwen2": ("Qwen2Config", "Qwen2ForSequenceClassification", dict(
        hidden_size=24, intermediate_size=36, num_attention_heads=3, num_key_value_heads=1, num_labels=1,
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ), torch.float32, None, 4),
    # The short factors: every row fits the original length.
    "phi3-short": ("Phi3Config", "Phi3ForCausalLM", dict(
        hidden_size=24, intermediate_size=13, num_attention_heads=3, num_key_value_heads=1, rms_norm_eps=1e-5,
        sliding_window=11, original_max_position_embeddings=72, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="longrope", rope_theta=300.0, partial_rotary_factor=0.75,
                             short_factor=[1.1, 1.7, 0.6], long_factor=[2.3, 4.1, 9.7]),
    ), torch.float16, None, 4),
    # The long ones: every row exceeds it.
    "phi3-long": ("Phi3Config", "Phi3ForCausalLM", dict(
        hidden_size=32, intermediate_size=11, num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-5,
        original_max_position_embeddings=16, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="longrope", rope_theta=300.0, partial_rotary_factor=0.75,
                             original_max_position_embeddings=16, short_factor=[1.1, 1.7, 0.6, 1.3, 0.8, 1.0],
                             long_factor=[1.3, 2.3, 4.1, 9.7, 3.0, 1.0]),
    ), torch.bfloat16, None, 5),
    # The fourth layer has no rope.
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", dict(
        num_hidden_layers=4, hidden_size=24, intermediate_size=13, num_attention_heads=3, num_key_value_heads=1,
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.bfloat16, None, 5),
    # The second layer has no rope, and only it has a window.
    "smollm3-window": ("SmolLM3Config", "SmolLM3ForCausalLM", dict(
        hidden_size=24, intermediate_size=12, num_attention_heads=3, num_key_value_heads=1, no_rope_layer_interval=2,
        use_sliding_window=True, sliding_window=6, mlp_bias=True, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.float16, None, 4),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", dict(
        hidden_size=32, intermediate_size=13, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.bfloat16, None, 5),
    # Yarn on the fourth layer, the only one without a window.
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", dict(
        num_hidden_layers=5, hidden_size=24, intermediate_size=9, num_attention_heads=3, num_key_value_heads=1,
        sliding_window=7, tie_word_embeddings=True,
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=500000.0),
            full_attention=dict(rope_type="yarn", rope_theta=500000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0,
                                original_max_position_embeddings=16, attention_factor=1.2079441541679836)),
    ), torch.bfloat16, None, 4),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", dict(
        hidden_size=30, intermediate_size=13, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="yarn", rope_theta=300.0, factor=8.0, beta_fast=4.0, beta_slow=1.0, mscale=1.0,
                             mscale_all_dim=1.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.3),
    ), torch.float16, None, 5),
    "mistral3": ("Mistral3Config", "Mistral3ForConditionalGeneration", dict(
        tie_word_embeddings=False,
        text_config=dict(
            model_type="ministral3", hidden_size=25, intermediate_size=13, num_attention_heads=3,
            num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
            rope_parameters=dict(rope_type="yarn", rope_theta=300.0, factor=8.0, beta_fast=4.0, beta_slow=1.0,
                                 mscale=1.0, mscale_all_dim=0.0, original_max_position_embeddings=16,
                                 llama_4_scaling_beta=0.2)),
        vision_config=dict(model_type="pixtral", hidden_size=8, intermediate_size=6, num_hidden_layers=1,
                           num_attention_heads=2, head_dim=4, image_size=8, patch_size=4),
    ), torch.bfloat16, None, 5),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", dict(
        hidden_size=27, intermediate_size=13, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        attention_out_bias=True, residual_dropout=0.0, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.bfloat16, "20KB", 4),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", dict(
        hidden_size=25, intermediate_size=11, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
    ), torch.float16, None, 4),
    "granite": ("GraniteConfig", "GraniteForCausalLM", dict(
        hidden_size=24, intermediate_size=13, num_attention_heads=3, num_key_value_heads=1, rms_norm_eps=1e-5,
        embedding_multiplier=3.3, residual_multiplier=0.7, logits_scaling=1.7, attention_multiplier=0.6,
        attention_bias=True, tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.float32, None, 4),
    # Caps that bend the logits and the attention's.
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", dict(
        num_hidden_layers=4, hidden_size=26, intermediate_size=10, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, query_pre_attn_scalar=5, sliding_window=6, final_logit_softcapping=2.5,
        attn_logit_softcapping=1.5, rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.bfloat16, None, 4),
    # The sixth layer alone has no window.
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", dict(
        num_hidden_layers=7, hidden_size=26, intermediate_size=9, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, query_pre_attn_scalar=21, sliding_window=6,
        rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=20.0),
                             full_attention=dict(rope_type="linear", rope_theta=300.0, factor=3.0)),
    ), torch.bfloat16, None, 5),
    # The tensors have the names of transformers' modules.
    "gemma3": ("Gemma3Config", "Gemma3ForConditionalGeneration", dict(
        text_config=dict(
            hidden_size=24, intermediate_size=13, num_attention_heads=3, num_key_value_heads=1, head_dim=8,
            query_pre_attn_scalar=6, sliding_window=7, layer_types=["full_attention", "sliding_attention"],
            rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=20.0),
                                 full_attention=dict(rope_type="linear", rope_theta=300.0, factor=3.0))),
        mm_tokens_per_image=1, vision_config=SIGLIP,
    ), torch.float16, None, 5),
    # The old names of tensors, and the spelling of transformers 4.
    "gemma3-old": ("Gemma3Config", "Gemma3ForConditionalGeneration", dict(
        text_config=dict(
            hidden_size=27, intermediate_size=11, num_attention_heads=3, num_key_value_heads=1, head_dim=8,
            query_pre_attn_scalar=6, sliding_window=7, sliding_window_pattern=2,
            rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=20.0),
                                 full_attention=dict(rope_type="linear", rope_theta=300.0, factor=3.0))),
        mm_tokens_per_image=1, vision_config=SIGLIP,
    ), torch.bfloat16, None, 4),
    "reward-gemma3_text": ("Gemma3TextConfig", "Gemma3TextForSequenceClassification", dict(
        hidden_size=26, intermediate_size=13, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_labels=1,
        query_pre_attn_scalar=5, sliding_window=6, sliding_window_pattern=2,
        rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=20.0),
                             full_attention=dict(rope_type="default", rope_theta=300.0)),
    ), torch.bfloat16, None, 4),
    "reward-phi3": ("Phi3Config", "Phi3ForSequenceClassification", dict(
        hidden_size=24, intermediate_size=13, num_attention_heads=3, num_key_value_heads=1, num_labels=1,
        sliding_window=7, tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.bfloat16, None, 5),
    "reward-olmo2": ("Olmo2Config", "Olmo2ForSequenceClassification", dict(
        num_hidden_layers=1, hidden_size=32, intermediate_size=11, num_attention_heads=4, num_key_value_heads=2,
        num_labels=1, tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.float16, None, 5),
    # Mixtures of experts: one tensor for each matrix, as on the Hub.
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", dict(
        hidden_size=26, intermediate_size=13, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_local_experts=5, num_experts_per_tok=2, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.bfloat16, "20KB", 5),
    # The second layer is dense; an expert has a panel of outputs and a part of one.
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(
        num_hidden_layers=3, hidden_size=24, intermediate_size=11, moe_intermediate_size=35, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True,
        mlp_only_layers=[1], tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.float16, None, 4),
    # The weights of experts do not sum to one; the first layer is dense; one tensor for all experts.
    "qwen3_moe-stacked": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(
        hidden_size=25, intermediate_size=13, moe_intermediate_size=9, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False, decoder_sparse_step=2,
        use_sliding_window=True, sliding_window=9, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.bfloat16, None, 5),
    "reward-mixtral": ("MixtralConfig", "MixtralForSequenceClassification", dict(
        hidden_size=24, intermediate_size=10, num_attention_heads=3, num_key_value_heads=1, num_labels=1,
        num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=200.0),
    ), torch.bfloat16, None, 4),
    # Sinks, a window in the first and the third layer, biases of experts, and limits that many gates and ups exceed.
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", dict(
        num_hidden_layers=3, hidden_size=26, intermediate_size=13, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_local_experts=8, num_experts_per_tok=3, sliding_window=9, swiglu_limit=1.5,
        tie_word_embeddings=False,
        rope_parameters=dict(rope_type="yarn", rope_theta=300.0, factor=8.0, beta_fast=4.0, beta_slow=1.0,
                             truncate=False, original_max_position_embeddings=16),
    ), torch.bfloat16, "20KB", 5),
    # Experts in MXFP4, and a config.json without a rope, an alpha, a limit or the layers' types.
    "gpt_oss-mxfp4": ("GptOssConfig", "GptOssForCausalLM", dict(
        hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_local_experts=4, num_experts_per_tok=2, sliding_window=21, tie_word_embeddings=False,
        max_position_embeddings=131072,
    ), torch.bfloat16, None, 5),
    "reward-gpt_oss": ("GptOssConfig", "GptOssForSequenceClassification", dict(
        hidden_size=24, intermediate_size=10, num_attention_heads=3, num_key_value_heads=1, head_dim=8, num_labels=1,
        num_local_experts=4, num_experts_per_tok=2, sliding_window=7, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="yarn", rope_theta=300.0, factor=8.0, truncate=False,
                             original_max_position_embeddings=16),
    ), torch.float16, None, 5),
    # The second layer alone has attention.
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", dict(
        num_hidden_layers=3, hidden_size=22, intermediate_size=13, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=5,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1],
                             mrope_interleaved=True),
    ), torch.bfloat16, None, 5),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", dict(
        tie_word_embeddings=False,
        text_config=dict(
            model_type="qwen3_5_text", hidden_size=20, intermediate_size=9, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2,
            linear_key_head_dim=7, linear_value_head_dim=35, linear_conv_kernel_dim=3, full_attention_interval=2,
            layer_types=["linear_attention", "full_attention"],
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5,
                                 mrope_section=[1, 1, 0], mrope_interleaved=True)),
        vision_config=dict(depth=1, hidden_size=8, intermediate_size=6, num_heads=2, out_hidden_size=20, patch_size=4,
                           num_position_embeddings=4),
    ), torch.float32, None, 5),
    # The second layer alone has attention, and a dense MLP; the projections of linear attention go by key heads.
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", dict(
        num_hidden_layers=3, hidden_size=22, intermediate_size=13, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=7, linear_value_head_dim=5,
        layer_types=["linear_attention", "full_attention", "linear_attention"], mlp_only_layers=[1], num_experts=6,
        num_experts_per_tok=3, moe_intermediate_size=11, shared_expert_intermediate_size=35, norm_topk_prob=False,
        tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.25),
    ), torch.float16, None, 4),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", dict(
        num_hidden_layers=3, hidden_size=21, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=9, linear_value_head_dim=6,
        layer_types=["linear_attention", "full_attention", "linear_attention"], num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=9, shared_expert_intermediate_size=14, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1],
                             mrope_interleaved=True),
    ), torch.bfloat16, None, 5),
    # One tensor for all experts, as in the released files.
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", dict(
        tie_word_embeddings=False,
        text_config=dict(
            model_type="qwen3_5_moe_text", hidden_size=20, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=7, linear_value_head_dim=11,
            layer_types=["linear_attention", "full_attention"], num_experts=5, num_experts_per_tok=2,
            moe_intermediate_size=10, shared_expert_intermediate_size=9,
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5,
                                 mrope_section=[1, 1, 0], mrope_interleaved=True)),
        vision_config=dict(depth=1, hidden_size=8, intermediate_size=6, num_heads=2, out_hidden_size=20, patch_size=4,
                           num_position_embeddings=4),
    ), torch.bfloat16, None, 5),
    "reward-qwen3_next": ("Qwen3NextConfig", "Qwen3NextForSequenceClassification", dict(
        hidden_size=22, intermediate_size=9, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_labels=1,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=5, linear_value_head_dim=6,
        layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=9, shared_expert_intermediate_size=8, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
    ), torch.bfloat16, None, 5),
    "reward-qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5TextForSequenceClassification", dict(
        hidden_size=22, intermediate_size=9, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_labels=1,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=5, linear_value_head_dim=6,
        layer_types=["linear_attention", "full_attention"], tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 0],
                             mrope_interleaved=True),
    ), torch.bfloat16, None, 5),
    # Routers with corrections: one group of experts, and two of four, whose weights do not sum to one.
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", dict(
        num_hidden_layers=3, hidden_size=24, intermediate_size=13, moe_intermediate_size=9, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, n_routed_experts=6, num_experts_per_tok=2, first_k_dense_replace=1,
        routed_scaling_factor=1.8, use_qk_norm=True, attention_bias=True, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=200.0, partial_rotary_factor=0.5),
    ), torch.bfloat16, "20KB", 5),
    "glm4_moe-groups": ("Glm4MoeConfig", "Glm4MoeForCausalLM", dict(
        hidden_size=25, intermediate_size=13, moe_intermediate_size=11, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, n_routed_experts=8, num_experts_per_tok=3, first_k_dense_replace=0, n_group=4, topk_group=2,
        n_shared_experts=2, norm_topk_prob=False, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=200.0, partial_rotary_factor=0.5),
    ), torch.float32, None, 4),
    # Latent attention: compressed queries and pairs of neighbours, or neither. Sizes fill no panel.
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", dict(
        hidden_size=28, intermediate_size=13, moe_intermediate_size=9, num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=10, kv_lora_rank=14, qk_nope_head_dim=7, qk_rope_head_dim=6, v_head_dim=5, n_routed_experts=8,
        num_experts_per_tok=3, first_k_dense_replace=1, n_group=4, topk_group=2, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=32,
                             mscale=1.0, mscale_all_dim=0.8),
    ), torch.bfloat16, None, 4),
    "deepseek_v3-plain": ("DeepseekV3Config", "DeepseekV3ForCausalLM", dict(
        hidden_size=24, intermediate_size=13, moe_intermediate_size=11, num_attention_heads=3, num_key_value_heads=3,
        q_lora_rank=None, kv_lora_rank=34, qk_nope_head_dim=33, qk_rope_head_dim=4, v_head_dim=35, n_routed_experts=4,
        num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1, rope_interleave=False,
        attention_bias=True, tie_word_embeddings=False, rope_parameters=dict(rope_type="default", rope_theta=100.0),
    ), torch.float32, None, 5),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", dict(
        hidden_size=24, intermediate_size=13, moe_intermediate_size=9, num_attention_heads=2, num_key_value_heads=2,
        q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, n_routed_experts=5,
        num_experts_per_tok=2, mlp_layer_types=["dense", "sparse"], tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=100.0),
    ), torch.float16, None, 5),
    "reward-deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForSequenceClassification", dict(
        hidden_size=20, intermediate_size=9, moe_intermediate_size=7, num_attention_heads=2, num_key_value_heads=2,
        q_lora_rank=8, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=3, n_routed_experts=4,
        num_experts_per_tok=2, first_k_dense_replace=1, n_group=2, topk_group=1, num_labels=1, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=100.0),
    ), torch.bfloat16, None, 5),
}

# The rows' lengths, the prompt's, the number of new tokens, the embedding's scale, the seed (None: 100 + the index).
DEFAULTS = dict(lengths=LENGTHS, prompt=PROMPT, new=64, embed=1.0, seed=None)
SETTINGS = {
    **{name: dict(new=40) for name in ("llama2", "llama3", "mistral", "qwen2", "qwen3")},
    "phi3-short": dict(lengths=[1, 2, 31, 33, 72]),
    "phi3-long": dict(lengths=[17, 18, 33, 70], prompt=17, embed=0.25),
    "smollm3": dict(embed=0.25),
    "smollm3-window": dict(embed=0.25),
    "olmo2": dict(embed=0.25),
    "olmo3": dict(embed=0.35),
    "ministral3": dict(embed=0.25),
    "seed_oss": dict(embed=0.25),
    "granite": dict(embed=0.25),
    "gemma2": dict(embed=0.25),
    "gemma3_text": dict(embed=0.25),
    "gemma3": dict(embed=0.25),
    "gemma3-old": dict(embed=0.25),
    "qwen3_5": dict(embed=0.5, seed=203),
    "qwen3_5_text": dict(lengths=[1, 2, 31, 65, 90], seed=125),
    "reward-qwen3_5_text": dict(seed=127),
    "reward-gemma3_text": dict(embed=0.25),
    "qwen3_moe": dict(embed=0.25),
    "glm4_moe": dict(seed=322),
    "glm4_moe-groups": dict(embed=0.25, seed=337),
    "deepseek_v3": dict(seed=405),
    "deepseek_v3-plain": dict(seed=409),
    "glm4_moe_lite": dict(seed=415),
    "qwen3_next": dict(lengths=[1, 2, 31, 65, 90], seed=141),
    "qwen3_5_moe_text": dict(lengths=[1, 2, 31, 65, 90], seed=132),
    "qwen3_5_moe": dict(embed=0.5, seed=152),
    "reward-qwen3_next": dict(seed=134),
    "reward-deepseek_v3": dict(seed=404),
    "gpt_oss": dict(seed=301),
    "gpt_oss-mxfp4": dict(seed=302),
    "reward-gpt_oss": dict(seed=303),
}


def setting(name, key):
    return {**DEFAULTS, **SETTINGS.get(name, {})}[key]
