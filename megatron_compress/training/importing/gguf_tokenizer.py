"""The tokenizer inside a GGUF file, as a file of the `tokenizers` library."""

from __future__ import annotations

_CONTROL = 3  # GGUF's number for tokens that no text contains
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_of(reader) -> str | None:
    """JSON of the byte-level BPE in `reader` (a GGUFReader); None for another kind, or for unknown splitting rules."""

    def field(key: str):
        return reader.fields[key].contents() if key in reader.fields else None

    rules = field("tokenizer.ggml.pre")
    if field("tokenizer.ggml.model") != "gpt2" or rules not in ("smollm", "qwen2", "gpt-2"):
        return None
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    _split(tokenizer, rules)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer.to_str()


def _split(tokenizer, rules: str) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    if rules == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        first = [pre_tokenizers.Split(Regex(_QWEN2), "isolated", invert=False)]
    else:
        first = [pre_tokenizers.Digits(individual_digits=True)] if rules == "smollm" else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules != "qwen2")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
