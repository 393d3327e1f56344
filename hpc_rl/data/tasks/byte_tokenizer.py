"""A tokenizer whose ids are the bytes of the text: 256 byte tokens, then end of text and padding."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS_TOKEN, PAD_TOKEN = "<|endoftext|>", "<|pad|>"
EOS_ID, PAD_ID, VOCAB_SIZE = 256, 257, 258


def byte_symbols() -> list[str]:
    """The printable symbol that byte-level tokenizers write for each byte.

    Printable Latin-1 characters stand for themselves; the others take the code points from 256 upwards, in order.

    Returns:
        256 one-character strings, by byte value.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def byte_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """Builds the tokenizer: ``encode("12+")`` is the bytes of the text, and nothing is added to them.

    Args:
        max_tokens: longest sequence of the model that it belongs to.

    Returns:
        A fast HF tokenizer with ``VOCAB_SIZE`` ids, id ``EOS_ID`` as end and ``PAD_ID`` as padding.
    """
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )
    assert (fast.eos_token_id, fast.pad_token_id, len(fast)) == (EOS_ID, PAD_ID, VOCAB_SIZE), "special ids moved"
    return fast
