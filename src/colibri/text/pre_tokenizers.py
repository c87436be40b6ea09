"""How vocabularies cut a text before they merge letters, by the names that GGUF files give it.

The expressions are those of the vocabularies' own tokenizer.json. A name that is not here is
refused: text cut in another way is not what the model was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _words(digits: str) -> str:
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_SIGNS}|{_BLANKS}"


def _cased(signs: str, scripts: str = "", without: str = "") -> str:
    """Words in which capitals come first."""
    before = r"[^\r\n\p{L}\p{N}]?"
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    first, second = (
        f"{before}{upper}{a}{lower}{b}{_ENDINGS}?" for a, b in (("*", "+"), ("+", "*"))
    )
    return rf"{scripts}{first}|{second}|\p{{N}}{{1,3}}|{signs}|{_BLANKS}"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_O200K = _cased(r" ?[^\s\p{L}\p{N}]+[\r\n/]*")
_KIMI = _cased(_SIGNS, r"[\p{Han}]+|", r"&&[^\p{Han}]")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
)
# Its list of letters is that of all that have a case.
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",  # noqa: RUF001
    r"\s+$",
    "[一-龥\u0800-一가-\ud7ff]+",
    r"\p{N}+",
)
_PLAIN = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut.

    Attributes:
        patterns: regular expressions, each applied to what the one before left between its matches.
        nfc: whether text is composed first.
        ignore_merges: whether a piece that is a token is never cut.
        adds_bos: whether a prompt begins with the token for that where the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def _named(way: PreTokenizer, *names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names, way)


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_named(PreTokenizer(_PLAIN), "default"),
    **_named(PreTokenizer((_GPT2,)), "gpt-2", "phi-2", "mpt", "jina-en"),
    **_named(PreTokenizer((_GPT2,), nfc=True), "olmo", "dclm"),
    **_named(
        PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
        *("llama3", "llama-v3", "llama-bpe", "falcon3"),
    ),
    **_named(PreTokenizer((_LLAMA3,)), "glm4", "chatglm-bpe", "smaug-bpe", "dbrx"),
    **_named(PreTokenizer((_QWEN2,), nfc=True), "qwen2", "deepseek-r1-qwen", "megrez"),
    **_named(PreTokenizer((_QWEN35,), nfc=True), "qwen35"),
    **_named(PreTokenizer((_O200K,), ignore_merges=True), "gpt-4o", "llama4"),
    **_named(PreTokenizer((_O200K,)), "minimax-m2"),
    **_named(PreTokenizer((_KIMI,)), "kimi-k2"),
    **_named(PreTokenizer(_DEEPSEEK_V3), "deepseek-v3"),
    **_named(PreTokenizer(_DEEPSEEK_LLM), "deepseek-llm"),
}
