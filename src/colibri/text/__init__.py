"""Text: tokenizers, chat templates, and text that arrives piece by piece."""

from colibri.text.chat import encode_chat
from colibri.text.detokenizer import Detokenizer
from colibri.text.spellings import ControlToken
from colibri.text.stop import MAX_STOP_STRINGS, StopStrings
from colibri.text.template import ChatTemplate, Message
from colibri.text.tokenizer import Tokenizer

__all__ = [
    "MAX_STOP_STRINGS",
    "ChatTemplate",
    "ControlToken",
    "Detokenizer",
    "Message",
    "StopStrings",
    "Tokenizer",
    "encode_chat",
]
