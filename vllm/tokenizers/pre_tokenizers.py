"""How a byte-level vocabulary cuts a text before merging, by the name that GGUF files give it (tokenizer.ggml.pre)."""

import dataclasses

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from vllm.logger import init_logger

logger = init_logger(__name__)

# The patterns are properties of the models: text cut in another way gives other tokens than the model was trained on.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}"
_QWEN_2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS_AND_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True, slots=True)
class PreTokenization:
    """What a name stands for, beside the vocabulary and the merges."""

    pattern: str | None = None  # None: GPT-2's own
    splits_digits: bool = False  # each digit by itself, before anything else
    is_composed: bool = False  # the text is brought to Unicode's composed form (NFC) first
    ignores_merges: bool = False  # a whole word of the vocabulary is taken as it is
    adds_bos: bool = False  # unless tokenizer.ggml.add_bos_token says otherwise

    def make_pre_tokenizer(self) -> PreTokenizer:
        if self.pattern is not None:
            split = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        gpt_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if self.splits_digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt_2])
        return gpt_2

    def make_normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.is_composed else None


_GPT_2 = PreTokenization()
_SPLIT_DIGITS = PreTokenization(splits_digits=True)
_LLAMA_BPE = PreTokenization(pattern=_LLAMA_3, ignores_merges=True, adds_bos=True)
_QWEN = PreTokenization(pattern=_QWEN_2, is_composed=True)

_BY_NAME = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo"), _GPT_2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _SPLIT_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), _LLAMA_BPE),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN),
    "tekken": PreTokenization(pattern=_TEKKEN, ignores_merges=True, adds_bos=True),
}


def find_pre_tokenization(name: str | None) -> PreTokenization:
    """Return what `name` stands for; an unknown one is read as GPT-2's, and said in the log."""
    found = _BY_NAME.get(name or "default")
    if found is None:
        known = ", ".join(sorted(_BY_NAME))
        logger.warning(
            "tokenizer.ggml.pre %r is not known: text is cut as GPT-2 does it, and some tokens may differ from those "
            "that the model was trained on (known: %s)",
            name,
            known,
        )
        return _GPT_2
    return found
