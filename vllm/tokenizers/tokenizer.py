"""The engine's tokenizer: the `tokenizers` library, plus what a model's folder says about special tokens and chat."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.chat_template import render_chat_template
from vllm.tokenizers.token_bytes import TokenBytes


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What stands beside the vocabulary in a model's folder or GGUF metadata."""

    special_tokens: Mapping[str, AddedToken] = dataclasses.field(default_factory=dict)  # "bos_token" → token
    extra_special_tokens: tuple[AddedToken, ...] = ()
    added_tokens: Mapping[int, AddedToken] = dataclasses.field(default_factory=dict)  # id → token, as configured
    chat_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)  # "default" → template
    add_bos_token: bool | None = None  # None: as the tokenizer's own post-processor does it
    add_eos_token: bool | None = None
    model_max_length: int | None = None


class Tokenizer:
    """Text to token ids and back, without torch or transformers.

    `decode` is the library's own; incremental text comes from `token_bytes` (see vllm/v1/engine/detokenizer.py).
    Safe to use from several threads once constructed.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings, name: str = "") -> None:
        self.name = name
        self.settings = settings
        self.backend = backend
        # A folder may have been saved with truncation or padding on: a prompt is never cut or filled in silence.
        backend.no_truncation()
        backend.no_padding()
        _add_missing_tokens(backend, settings)
        _set_post_processor(backend, settings)
        self.token_bytes = TokenBytes(backend)
        self.all_special_ids: frozenset[int] = self.token_bytes.special_ids
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.pad_token_id = self._id_of("pad_token")
        self.unk_token_id = self._id_of("unk_token")

    # ------------------------------------------------------------ vocabulary

    @functools.cached_property
    def vocab_size(self) -> int:
        """The number of token ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self.vocab_size

    @functools.cached_property
    def max_token_id(self) -> int:
        """The largest token id; more than vocab_size − 1 where ids have holes."""
        return max(self.backend.get_vocab(with_added_tokens=True).values())

    @property
    def bos_token(self) -> str | None:
        return self._content_of("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._content_of("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._content_of("pad_token")

    def get_vocab(self) -> dict[str, int]:
        """Return name → id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the vocabulary's names (with its markers); "" for an id that it doesn't know."""
        return [self.backend.id_to_token(token_id) or "" for token_id in ids]

    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]:
        """Return the ids of names; None for a name that the vocabulary doesn't hold."""
        return [self.backend.token_to_id(token) for token in tokens]

    # ------------------------------------------------------------ text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; `add_special_tokens` adds those that the model puts around every text."""
        return self.backend.encode(_encodable(text), add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text."""
        encodings = self.backend.encode_batch_fast(
            [_encodable(text) for text in texts], add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids that the tokenizer doesn't know are left out."""
        return self.backend.decode([i for i in ids if 0 <= i < 2**32], skip_special_tokens=skip_special_tokens)

    # ------------------------------------------------------------ chat

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template, if it has one."""
        return self.settings.chat_templates.get("default")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **chat_template_kwargs: Any,
    ) -> str:
        """Return the prompt of a conversation; encode it with add_special_tokens=False.

        `chat_template` is a template, or the name of one of the model's; `chat_template_kwargs` are for the template.
        """
        names = {name: token.content for name, token in self.settings.special_tokens.items()}
        return render_chat_template(
            self._choose_template(chat_template, has_tools=bool(tools)),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**names, "tools": tools, "documents": documents, **chat_template_kwargs},
        )

    def _choose_template(self, given: str | None, *, has_tools: bool) -> str:
        templates = self.settings.chat_templates
        if given is not None:
            return templates.get(given, given)
        if has_tools and "tool_use" in templates:
            return templates["tool_use"]
        if (template := self.chat_template) is None:
            known = f" (it has templates named {sorted(templates)}: name one)" if templates else ""
            raise VLLMValidationError(
                f"the tokenizer of {self.name or 'this model'} has no chat template{known}; give one as chat_template, "
                "or use a plain prompt",
                parameter="chat_template",
            )
        return template

    # ------------------------------------------------------------ saving

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja: a folder that transformers reads too."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {name: token.content for name, token in self.settings.special_tokens.items()}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config["clean_up_tokenization_spaces"] = False
        if self.settings.extra_special_tokens:
            config["additional_special_tokens"] = [token.content for token in self.settings.extra_special_tokens]
        if self.settings.model_max_length is not None:
            config["model_max_length"] = self.settings.model_max_length
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    def _content_of(self, role: str) -> str | None:
        token = self.settings.special_tokens.get(role)
        return None if token is None else token.content

    def _id_of(self, role: str) -> int | None:
        content = self._content_of(role)
        return None if content is None else self.backend.token_to_id(content)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 (and so the library) can't hold."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text


def _add_missing_tokens(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Make the tokens that the configuration names special, and add those that the vocabulary lacks.

    Adding rebuilds the library's matcher, so that nothing is added that is there already.
    """
    there = backend.get_added_tokens_decoder()
    special_names = {token.content for token in there.values() if token.special}
    names = special_names | {token.content for token in there.values()}
    configured = [token for _, token in sorted(settings.added_tokens.items()) if token.content not in names]
    backend.add_tokens([token for token in configured if not token.special])
    roles = [*settings.special_tokens.values(), *settings.extra_special_tokens]
    specials = {token.content: token for token in [*configured, *roles] if token.special}
    missing = [token for content, token in specials.items() if content not in special_names]
    if missing:
        backend.add_special_tokens(missing)


def _set_post_processor(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Put bos before and eos behind each text as the configuration says; if it is silent, leave what the folder has."""
    if settings.add_bos_token is None and settings.add_eos_token is None:
        return
    special: dict[str, int] = {}

    def take(role: str, is_wanted: bool | None) -> list[str]:
        token = settings.special_tokens.get(role)
        token_id = backend.token_to_id(token.content) if is_wanted and token else None
        if token is None or token_id is None:
            return []
        special[token.content] = token_id
        return [token.content]

    single = [*take("bos_token", settings.add_bos_token), "$A", *take("eos_token", settings.add_eos_token)]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=list(special.items())
    )
