"""Text and tokens: loading a tokenizer, the true bytes of each token, chat templates. No torch, no transformers."""

from vllm.tokenizers.hf import get_tokenizer, make_hf_tokenizer
from vllm.tokenizers.loader import load_tokenizer
from vllm.tokenizers.token_bytes import TokenBytes
from vllm.tokenizers.tokenizer import Tokenizer

__all__ = ["TokenBytes", "Tokenizer", "get_tokenizer", "load_tokenizer", "make_hf_tokenizer"]
