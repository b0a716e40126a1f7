"""Tiny Hugging Face models with random weights, built from configurations without any download."""

import pytest
import torch
from torch import Tensor

import eigentrace as et

transformers = pytest.importorskip("transformers")


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 20, shape)


def padded(size: int, length: int = 6) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(2, length + 1, (size,))
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    return tokens(size, length) * mask, mask


def bert():
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    ids, mask = padded(7)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 3, (7,))}
    return et.classification, transformers.BertForSequenceClassification(config), batch


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=1
    )
    ids, mask = padded(7)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return et.causal_lm, transformers.GPT2LMHeadModel(config), batch


def t5():
    config = transformers.T5Config(
        vocab_size=20,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )
    ids, mask = padded(7)
    labels, label_mask = padded(7, 4)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(label_mask == 0, -100)}
    return et.seq2seq, transformers.T5ForConditionalGeneration(config), batch


def marian():
    config = transformers.MarianConfig(
        vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=8,
        pad_token_id=2, eos_token_id=1, forced_eos_token_id=1, decoder_start_token_id=2,
    )  # fmt: skip
    ids, mask = padded(7)
    labels, label_mask = padded(7, 4)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(label_mask == 0, -100)}
    return et.seq2seq, transformers.MarianMTModel(config), batch


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=20, num_mel_bins=4, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_source_positions=6,
        max_target_positions=8, pad_token_id=2, bos_token_id=1, eos_token_id=1, decoder_start_token_id=0,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    labels, label_mask = padded(7, 4)
    batch = {"input_features": torch.randn(7, 4, 12), "labels": labels.masked_fill(label_mask == 0, -100)}
    return et.seq2seq, transformers.WhisperForConditionalGeneration(config), batch


def vit():
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, num_labels=3,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(7, 1, 8, 8), "labels": torch.randint(0, 3, (7,))}
    return et.classification, transformers.ViTForImageClassification(config), batch


MAKERS = {make.__name__: make for make in (bert, gpt2, t5, marian, whisper, vit)}
