"""Tiny Hugging Face model folders, built from configs without any download, as written by `save_pretrained`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = (
    "the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "over", "mat", "tree", "house", "red",
    "blue", "small", "big", "and", "it",
)  # fmt: skip
CLASSES = ("cat", "dog", "bird")


def bert(folder: Path, **config: Any) -> Path:
    """A classifier of three classes over WordPiece tokens, with segments and at most 40 positions."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=40)
    names = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: i for i, name in enumerate(CLASSES)}}
    settings = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=40, **(names | config),
    )  # fmt: skip
    return _save(folder, transformers.BertForSequenceClassification(settings), tokenizer)


def roberta(folder: Path) -> Path:
    """A classifier whose positions start after the padding index: 20 entries, 18 tokens; it declares no limit."""
    import transformers

    tokenizer = _words(transformers, eos_token="<end>", pad_token="<pad>")
    settings = transformers.RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=20, pad_token_id=tokenizer.pad_token_id, num_labels=len(CLASSES), type_vocab_size=1,
    )  # fmt: skip
    return _save(folder, transformers.RobertaForSequenceClassification(settings), tokenizer)


def gpt2(folder: Path) -> Path:
    """A language model whose tokenizer has no padding token, with 20 positions, which is not a multiple of 8."""
    import transformers

    tokenizer = _words(transformers, eos_token="<end>", model_max_length=20)
    settings = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=2, n_positions=20, bos_token_id=0, eos_token_id=0
    )
    return _save(folder, transformers.GPT2LMHeadModel(settings), tokenizer)


def t5(folder: Path) -> Path:
    """An encoder-decoder with relative positions, which takes texts of any length."""
    import transformers

    tokenizer = _words(transformers, eos_token="<end>", pad_token="<pad>")
    settings = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=1,
        pad_token_id=1, eos_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return _save(folder, transformers.T5ForConditionalGeneration(settings), tokenizer)


def marian(folder: Path) -> Path:
    """An encoder-decoder whose decoder starts with the padding token, whose embedding is constant."""
    import transformers

    tokenizer = _words(transformers, eos_token="<end>", pad_token="<pad>", model_max_length=24)
    settings = transformers.MarianConfig(
        vocab_size=len(tokenizer), d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=24, pad_token_id=1,
        eos_token_id=0, forced_eos_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    return _save(folder, transformers.MarianMTModel(settings), tokenizer)


def vit(folder: Path, **processor: Any) -> Path:
    """A classifier of images in three classes, with the settings of its image processor."""
    import transformers

    settings = transformers.ViTConfig(
        image_size=8, patch_size=4, num_channels=3, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, id2label=dict(enumerate(CLASSES)), label2id={name: i for i, name in enumerate(CLASSES)},
    )  # fmt: skip
    _save(folder, transformers.ViTForImageClassification(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_SETTINGS | processor))
    return folder


IMAGE_SETTINGS = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 8, "width": 8},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}


def sentences(count: int, longest: int = 18, seed: int = 0) -> list[str]:
    """Texts of very different lengths, the first and the last of one word."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest + 1, count)
    lengths[[0, -1]] = 1
    return [" ".join(generator.choice(WORDS, length)) for length in lengths]


def pixels(count: int, seed: int = 0) -> list[np.ndarray]:
    """Images of very different sizes and shapes."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (*generator.integers(6, 20, 2), 3), dtype=np.uint8) for _ in range(count)]


def _words(transformers: Any, **special: Any) -> Any:
    """A tokenizer of whole words that appends the end token to every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(["<end>", "<pad>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "pad_token" in special:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


def _save(folder: Path, model: Any, tokenizer: Any = None) -> Path:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # larger than the usual initialisation, so that every weight matters
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
