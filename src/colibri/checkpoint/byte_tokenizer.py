"""A tokenizer for generated checkpoints: every byte is a token, and four ids mark turns."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from colibri.checkpoint.safetensors_writer import write_json

SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
NUM_TOKENS = 256 + len(SPECIAL)
END_OF_TEXT, END_OF_TURN = 256, 259
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_byte_tokenizer(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json.

    Token b is byte b; 256 and up are `SPECIAL`. Generation ends at `<|endoftext|>` and `<|end|>`.
    """
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL[0],
            "chat_template": _TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_json(directory / "generation_config.json", {"eos_token_id": [END_OF_TEXT, END_OF_TURN]})


def _byte_characters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 stands for itself, the others for the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
