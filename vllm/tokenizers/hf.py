"""The Hugging Face tokenizer object, for callers that want one; importing this module does not import transformers."""

from pathlib import Path
from typing import Any

from vllm.tokenizers.loader import check_mode, find_tokenizer_path, load_tokenizer
from vllm.tokenizers.tokenizer import Tokenizer


def get_tokenizer(
    name: str | Path,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    **kwargs: Any,
) -> Any:
    """Return transformers' tokenizer of a folder, a hub id or a .gguf file.

    Of a .gguf file it wraps the engine's own tokenizer, so that both give the same ids: transformers' reader
    leaves out some of what the file says (digits of "smollm", add_bos_token, add_space_prefix). `kwargs` go to
    transformers. Raises ModelLoadError when nothing is there.
    """
    check_mode(tokenizer_mode)
    path = find_tokenizer_path(name, revision)
    from transformers import AutoTokenizer  # takes seconds, and few callers need it

    if path.is_file() and path.name != "tokenizer.json":
        return make_hf_tokenizer(load_tokenizer(path), **kwargs)
    folder = path.parent if path.is_file() else path
    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, **kwargs)


def make_hf_tokenizer(tokenizer: Tokenizer, **kwargs: Any) -> Any:
    """Return a transformers tokenizer around the engine's own one."""
    from transformers import PreTrainedTokenizerFast  # as above

    roles = {role: token.content for role, token in tokenizer.settings.special_tokens.items()}
    given = {**roles, "clean_up_tokenization_spaces": False, "name_or_path": tokenizer.name, **kwargs}
    wrapper = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, **given)
    wrapper.chat_template = tokenizer.chat_template
    return wrapper
