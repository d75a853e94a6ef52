"""Architectures of transformers from small configs, with random weights and random data.

*Takes* nothing. *Gives* `ARCHITECTURES`: how to make each model, its inputs and its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers as hf

from tests.conformance.model_data import (
    VOCABULARY,
    Inputs,
    asked,
    classified_text,
    image,
    matched,
    pairs,
    patches,
    pictured,
    pixels,
    question,
    segmented,
    series,
    spectra,
    spectrogram,
    spoken,
    squares,
    text,
    unmasked_text,
    wave,
)

WIDTH, HEADS, FEED = 16, 2, 24


@dataclass(frozen=True)
class Architecture:
    """How to make a model and its data."""

    kind: str
    """decoder, encoder, encoder-decoder, vision, segmentation, detection, speech, multimodal, mixture of experts,
    state space, time series."""
    model: Callable[[], Any]
    inputs: Callable[[int], Inputs]
    loss: Callable[[Any], Any] = lambda outputs: outputs["loss"]


def _llama_like(config: Any, **more: Any) -> Any:
    return config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=FEED, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=1, max_position_embeddings=32, attention_dropout=0.1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip


def _bert_like(config: Any, **more: Any) -> Any:
    return config(**{
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "intermediate_size": FEED, "max_position_embeddings": 32, "pad_token_id": 0, "num_labels": 3, **more,
    })  # fmt: skip


def _vit_like(config: Any, **more: Any) -> Any:
    return config(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=FEED, image_size=8,
        patch_size=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=3, **more,
    )  # fmt: skip


def _bart_like(config: Any, **more: Any) -> Any:
    return config(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=FEED, decoder_ffn_dim=FEED, max_position_embeddings=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.1, attention_dropout=0.1,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, **more,
    )  # fmt: skip


def _speech_like(config: Any, **more: Any) -> Any:
    return config(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=FEED, vocab_size=12,
        conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, layerdrop=0.0, mask_time_prob=0.0, pad_token_id=0, num_labels=3,
        classifier_proj_size=8, ctc_loss_reduction="mean", ctc_zero_infinity=True, **more,
    )  # fmt: skip


def _resnet(**more: Any) -> Any:
    return hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=3, **more
    )


def _series_like(config: Any, **more: Any) -> Any:
    return config(
        prediction_length=4, context_length=8, lags_sequence=[1, 3, 7], num_time_features=1, d_model=WIDTH,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        encoder_ffn_dim=FEED, decoder_ffn_dim=FEED, dropout=0.1, encoder_layerdrop=0.0, decoder_layerdrop=0.0, **more,
    )  # fmt: skip


def _clip_parts() -> dict[str, Any]:
    common = {"hidden_size": WIDTH, "intermediate_size": FEED, "num_hidden_layers": 2, "num_attention_heads": HEADS,
              "attention_dropout": 0.1}  # fmt: skip
    return {
        "text_config": {**common, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0,
                        "bos_token_id": 1, "eos_token_id": 2},
        "vision_config": {**common, "image_size": 8, "patch_size": 4},
        "projection_dim": 8,
    }  # fmt: skip


def _detr() -> Any:
    backbone = _resnet(out_features=["stage2"])
    config = hf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=WIDTH,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        encoder_ffn_dim=FEED, decoder_ffn_dim=FEED, num_queries=5, num_labels=3,
    )  # fmt: skip
    return hf.DetrForObjectDetection(config)


def _llava() -> Any:
    text_part = _llama_like(hf.LlamaConfig)
    vision = hf.CLIPVisionConfig(**{**_clip_parts()["vision_config"], "projection_dim": 8})
    config = hf.LlavaConfig(vision_config=vision, text_config=text_part, image_token_id=2, image_seq_length=4,
                            vision_feature_select_strategy="default", vision_feature_layer=-1)  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


ARCHITECTURES: dict[str, Architecture] = {
    # Decoders.
    "gpt2": Architecture("decoder", lambda: hf.GPT2LMHeadModel(hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=HEADS, bos_token_id=1,
        eos_token_id=2)), text),
    "llama": Architecture("decoder", lambda: hf.LlamaForCausalLM(_llama_like(hf.LlamaConfig)), text),
    "mistral": Architecture("decoder", lambda:
        hf.MistralForCausalLM(_llama_like(hf.MistralConfig, sliding_window=4)), text),
    "qwen2": Architecture("decoder", lambda: hf.Qwen2ForCausalLM(_llama_like(hf.Qwen2Config)), text),
    "qwen3": Architecture("decoder", lambda: hf.Qwen3ForCausalLM(_llama_like(hf.Qwen3Config, head_dim=8)), text),
    "gemma": Architecture("decoder", lambda: hf.GemmaForCausalLM(_llama_like(hf.GemmaConfig, head_dim=8)), text),
    "gemma2": Architecture("decoder", lambda: hf.Gemma2ForCausalLM(_llama_like(hf.Gemma2Config, head_dim=8)), text),
    "phi": Architecture("decoder", lambda: hf.PhiForCausalLM(_llama_like(hf.PhiConfig, resid_pdrop=0.1)), text),
    "opt": Architecture("decoder", lambda: hf.OPTForCausalLM(hf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, ffn_dim=FEED, num_attention_heads=HEADS,
        max_position_embeddings=32, word_embed_proj_dim=WIDTH, layerdrop=0.0, pad_token_id=0)), text),
    "bloom": Architecture("decoder", lambda: hf.BloomForCausalLM(hf.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=HEADS, hidden_dropout=0.1,
        attention_dropout=0.1)), text),
    "gpt_neox": Architecture("decoder", lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        intermediate_size=FEED,
        max_position_embeddings=32, hidden_dropout=0.1, attention_dropout=0.1)), text),
    # Encoders.
    "bert": Architecture("encoder", lambda: hf.BertForMaskedLM(_bert_like(hf.BertConfig)), text),
    "roberta": Architecture("encoder", lambda:
        hf.RobertaForSequenceClassification(_bert_like(hf.RobertaConfig)), classified_text),
    "distilbert": Architecture("encoder", lambda: hf.DistilBertForTokenClassification(hf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=WIDTH, n_layers=2, n_heads=HEADS, hidden_dim=FEED, max_position_embeddings=32,
        num_labels=VOCABULARY)), text),
    "albert": Architecture("encoder", lambda: hf.AlbertForQuestionAnswering(_bert_like(
        hf.AlbertConfig, num_labels=2, embedding_size=8, hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1)), question),
    "electra": Architecture("encoder", lambda: hf.ElectraForSequenceClassification(_bert_like(
        hf.ElectraConfig, embedding_size=8)), classified_text),
    "deberta_v2": Architecture("encoder", lambda: hf.DebertaV2ForMaskedLM(_bert_like(
        hf.DebertaV2Config, relative_attention=True, pos_att_type=["p2c", "c2p"])), text),
    "modernbert": Architecture("encoder", lambda: hf.ModernBertForMaskedLM(_bert_like(
        hf.ModernBertConfig, local_attention=4, attention_dropout=0.1, mlp_dropout=0.1)), text),
    # Encoder-decoders.
    "t5": Architecture("encoder-decoder", lambda: hf.T5ForConditionalGeneration(hf.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=FEED, num_layers=2, num_heads=HEADS,
        decoder_start_token_id=0,
        pad_token_id=0)), pairs),
    "bart": Architecture("encoder-decoder", lambda: hf.BartForConditionalGeneration(_bart_like(hf.BartConfig)), pairs),
    "mbart": Architecture("encoder-decoder", lambda:
        hf.MBartForConditionalGeneration(_bart_like(hf.MBartConfig)), pairs),
    "pegasus": Architecture("encoder-decoder", lambda:
        hf.PegasusForConditionalGeneration(_bart_like(hf.PegasusConfig)), pairs),
    # Vision.
    "vit": Architecture("vision", lambda: hf.ViTForImageClassification(_vit_like(hf.ViTConfig)), image(8)),
    "deit": Architecture("vision", lambda: hf.DeiTForImageClassification(_vit_like(hf.DeiTConfig)), image(8)),
    "beit": Architecture("vision", lambda:
        hf.BeitForImageClassification(_vit_like(hf.BeitConfig, drop_path_rate=0.2)), image(8)),
    "dinov2": Architecture("vision", lambda: hf.Dinov2ForImageClassification(_vit_like(
        hf.Dinov2Config, drop_path_rate=0.2)), image(8)),
    "swin": Architecture("vision", lambda: hf.SwinForImageClassification(hf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=2, drop_path_rate=0.2,
        hidden_dropout_prob=0.1, num_labels=3)), image(16)),
    "convnext": Architecture("vision", lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(
        num_stages=2, hidden_sizes=[8, 12], depths=[1, 2], drop_path_rate=0.2, num_labels=3)), image(16)),
    "resnet": Architecture("vision", lambda: hf.ResNetForImageClassification(_resnet()), image(16)),
    "mobilenet_v2": Architecture("vision", lambda: hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(
        image_size=32, depth_multiplier=0.25, num_labels=3, classifier_dropout_prob=0.2)), image(32)),
    # Segmentation and detection.
    "segformer": Architecture("segmentation", lambda: hf.SegformerForSemanticSegmentation(hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 8], patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8, num_labels=3)), segmented(16, 16)),
    "upernet": Architecture("segmentation", lambda: hf.UperNetForSemanticSegmentation(hf.UperNetConfig(
        backbone_config=_resnet(out_features=["stage1", "stage2"]), hidden_size=8, pool_scales=[1, 2],
        auxiliary_channels=4, auxiliary_in_channels=8, use_auxiliary_head=False, num_labels=3)), segmented(16, 16)),
    "detr": Architecture("detection", _detr, pixels(16), squares("logits", "pred_boxes")),
    "yolos": Architecture("detection", lambda: hf.YolosForObjectDetection(hf.YolosConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=FEED, image_size=[8, 8],
        patch_size=4, num_detection_tokens=3, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        use_mid_position_embeddings=True)), pixels(8), squares("logits", "pred_boxes")),
    # Speech.
    "wav2vec2": Architecture("speech", lambda:
        hf.Wav2Vec2ForSequenceClassification(_speech_like(hf.Wav2Vec2Config)), wave),
    "wav2vec2_ctc": Architecture("speech", lambda: hf.Wav2Vec2ForCTC(_speech_like(hf.Wav2Vec2Config)), spoken),
    "hubert": Architecture("speech", lambda: hf.HubertForSequenceClassification(_speech_like(hf.HubertConfig)), wave),
    "whisper": Architecture("speech", lambda: hf.WhisperForConditionalGeneration(_bart_like(
        hf.WhisperConfig, num_mel_bins=8, max_source_positions=10, max_target_positions=16)), spectrogram),
    "ast": Architecture("speech", lambda: hf.ASTForAudioClassification(hf.ASTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=FEED, patch_size=4,
        max_length=16, num_mel_bins=8, frequency_stride=4, time_stride=4, hidden_dropout_prob=0.1,
        num_labels=3)), spectra),
    # Multimodal.
    "clip": Architecture("multimodal", lambda: hf.CLIPModel(hf.CLIPConfig(**_clip_parts())), matched),
    "siglip": Architecture("multimodal", lambda: hf.SiglipModel(hf.SiglipConfig(**{
        key: value for key, value in _clip_parts().items() if key != "projection_dim"})), matched),
    "vilt": Architecture("multimodal", lambda: hf.ViltForQuestionAnswering(_vit_like(
        hf.ViltConfig, vocab_size=VOCABULARY, max_position_embeddings=32, max_image_length=-1)), asked),
    "llava": Architecture("multimodal", _llava, pictured),
    # Mixture of experts.
    "mixtral": Architecture("mixture of experts", lambda: hf.MixtralForCausalLM(_llama_like(
        hf.MixtralConfig, num_local_experts=3, num_experts_per_tok=2, output_router_logits=True)), text),
    "qwen2_moe": Architecture("mixture of experts", lambda: hf.Qwen2MoeForCausalLM(_llama_like(
        hf.Qwen2MoeConfig, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8,
        shared_expert_intermediate_size=8)), text),
    "switch_transformers": Architecture("mixture of experts", lambda: hf.SwitchTransformersForConditionalGeneration(
        hf.SwitchTransformersConfig(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=FEED, num_layers=2,
        num_heads=HEADS,
        num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=8,
        decoder_start_token_id=0, pad_token_id=0)), pairs),
    # State space.
    "mamba": Architecture("state space", lambda: hf.MambaForCausalLM(hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=2, expand=2,
        time_step_rank=2)), unmasked_text),
    "mamba2": Architecture("state space", lambda: hf.Mamba2ForCausalLM(hf.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=1, expand=2, num_heads=4, head_dim=8,
        n_groups=1, chunk_size=4)), unmasked_text),
    # Time series.
    "time_series_transformer": Architecture("time series", lambda: hf.TimeSeriesTransformerForPrediction(
        _series_like(hf.TimeSeriesTransformerConfig)), series),
    "informer": Architecture("time series", lambda: hf.InformerForPrediction(_series_like(hf.InformerConfig)), series),
    "autoformer": Architecture("time series", lambda: hf.AutoformerForPrediction(_series_like(
        hf.AutoformerConfig, label_length=4, moving_average=3)), series),
    "patchtst": Architecture("time series", lambda: hf.PatchTSTForPrediction(hf.PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, prediction_length=4, d_model=WIDTH,
        num_hidden_layers=1, num_attention_heads=HEADS, ffn_dim=FEED, attention_dropout=0.1, ff_dropout=0.1)), patches),
    "patchtsmixer": Architecture("time series", lambda: hf.PatchTSMixerForPrediction(hf.PatchTSMixerConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, prediction_length=4, d_model=8,
        num_layers=1)), patches),
}  # fmt: skip
