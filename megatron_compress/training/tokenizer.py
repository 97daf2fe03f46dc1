"""From text to token ids: bytes as they are, or a file of the `tokenizers` library."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_compress.strict_yaml import ConfigError

# Names that published tokenizers give to the token between documents, the most telling ones first.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|im_end|>")


@dataclass(frozen=True)
class Tokenizer:
    """A text's ids are below `vocab_size`; `end` follows each document.

    Args:
        digest: SHA-256 (hex) of the file; tells data and models of different tokenizers apart.
        unit: what one id stands for, as in "nats per byte".
        encode: UTF-8 bytes of a document -> its ids, int array [n], without `end`.
    """

    name: str
    vocab_size: int
    end: int
    digest: str
    unit: str
    encode: Callable[[bytes], np.ndarray]

    @property
    def dtype(self) -> type[np.unsignedinteger] | type[np.signedinteger]:
        """The narrowest type that Megatron's data sets have for these ids."""
        if self.vocab_size <= 256:
            return np.uint8
        return np.uint16 if self.vocab_size <= 65_500 else np.int32

    def document(self, text: bytes) -> np.ndarray:
        """The ids of a document and its end, [n + 1] of `dtype`."""
        return np.append(self.encode(text), self.end).astype(self.dtype)


def load_tokenizer(file: Path | None, end_token: str | None = None) -> Tokenizer:
    """Read a `tokenizers` file (tokenizer.json); None is the tokenizer of bytes, whose documents end with a zero byte.

    Raises:
        ConfigError: no such file, not a tokenizer, or it has no token that ends documents.
    """
    if file is None:
        return Tokenizer("bytes", 256, 0, "bytes", "byte", lambda text: np.frombuffer(text, dtype=np.uint8))
    import tokenizers  # only those who ask for it need the library

    try:
        content = file.read_bytes()
        model = tokenizers.Tokenizer.from_str(content.decode())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; give data.tokenizer a tokenizer.json") from None
    except Exception as error:  # the library raises plain Exception for whatever is wrong
        raise ConfigError(f"{file}: not a file of the `tokenizers` library: {error}") from None
    end = _end(file, model, end_token)

    def encode(text: bytes) -> np.ndarray:
        return np.array(model.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids, dtype=np.int32)

    return Tokenizer(file.name, model.get_vocab_size(), end, digest_of(content), "token", encode)


def digest_of(content: bytes) -> str:
    """`Tokenizer.digest` of a file's content."""
    return hashlib.sha256(content).hexdigest()


def _end(file: Path, model, end_token: str | None) -> int:
    names = _END_TOKENS if end_token is None else (end_token,)
    for name in names:
        if (end := model.token_to_id(name)) is not None:
            return end
    raise ConfigError(f"{file}: has no token {' or '.join(names)} to end documents with; name one in data.end_token")
