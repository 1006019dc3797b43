"""Chat templates: what a conversation becomes, and what is refused."""

import datetime
import json
import pathlib

import pytest

from tests.tiny_tokenizers import CHATML_TEMPLATE, INST_TEMPLATE, write_tiny_tokenizer
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.tokenizers import Tokenizer, load_tokenizer
from vllm.tokenizers.chat_template import render_chat_template

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return load_tokenizer(folder)


def render(template: str, **kwargs: object) -> str:
    return render_chat_template(template, HI, add_generation_prompt=False, **kwargs)  # type: ignore[arg-type]


def test_generation_prompt_is_added_unless_told_not_to(tokenizer: Tokenizer) -> None:
    closed = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.apply_chat_template(HI) == closed + "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(HI, add_generation_prompt=False) == closed


def test_special_tokens_in_the_rendered_text_become_single_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(tokenizer.apply_chat_template(HI), add_special_tokens=False)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids.count(2) == 1


def test_template_names_of_special_tokens_are_those_of_the_model(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path, kind="metaspace")
    tokenizer = load_tokenizer(tmp_path)
    conversation = [*HI, {"role": "assistant", "content": "yes"}]
    assert tokenizer.apply_chat_template(conversation) == "<s>[INST] hi [/INST] yes</s>"


def test_text_parts_are_joined_and_other_parts_are_refused_by_name(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, "three"]
    assert "user\none\ntwo\nthree<" in tokenizer.apply_chat_template([{"role": "user", "content": parts}])
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    with pytest.raises(VLLMUnsupportedError, match="image_url"):
        tokenizer.apply_chat_template([{"role": "user", "content": [parts[0], image]}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        (["hi"], r"messages\[0\] must be a dict"),
        ([{"content": "hi"}], r"messages\[0\] must have a role"),
        ([*HI, {"role": "user", "content": 3}], r"content of messages\[1\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "must hold a string"),
    ],
)
def test_malformed_conversations_are_refused_with_their_place(
    tokenizer: Tokenizer, messages: list[dict[str, str]], message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message) as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.parameter == "messages"


def test_rendering_leaves_the_callers_messages_alone(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": None}]
    before = json.dumps(messages)
    tokenizer.apply_chat_template(messages)
    assert json.dumps(messages) == before


def test_a_missing_template_says_what_to_do(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(VLLMValidationError, match="has no chat template.*give one as chat_template") as caught:
        tokenizer.apply_chat_template(HI)
    assert caught.value.parameter == "chat_template"
    assert tokenizer.apply_chat_template(HI, chat_template="{{ messages[0].content }}") == "hi"


def test_a_final_message_is_continued_without_its_closing_tokens(tokenizer: Tokenizer) -> None:
    conversation = [*HI, {"role": "assistant", "content": "Sure, "}]
    kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    assert tokenizer.apply_chat_template(conversation, **kwargs).endswith("<|im_start|>assistant\nSure, ")  # type: ignore[arg-type]
    stripping = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert tokenizer.apply_chat_template(conversation, chat_template=stripping, **kwargs) == "[hi][Sure,"  # type: ignore[arg-type]


def test_continuing_and_beginning_a_message_at_once_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(VLLMValidationError, match="can't both be set"):
        tokenizer.apply_chat_template(HI, continue_final_message=True)
    hiding = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(VLLMValidationError, match="shows the last message's text"):
        tokenizer.apply_chat_template(
            HI, chat_template=hiding, continue_final_message=True, add_generation_prompt=False
        )


def test_blocks_leave_no_whitespace_behind() -> None:
    assert (
        render("{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}") == "hi\n"
    )


def test_loop_controls_and_generation_tags_are_understood() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"


def test_json_is_written_for_a_model_not_for_html() -> None:
    value = {"b": "<é & 'x'>", "a": [1, None]}
    assert render("{{ value | tojson }}", value=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ value | tojson(indent=2) }}", value=value) == json.dumps(value, ensure_ascii=False, indent=2)
    assert render("{{ messages[0].content + '<b>' }}") == "hi<b>"


def test_strftime_now_gives_todays_date() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.date.today().year + d) for d in (-1, 0, 1)}


def test_template_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    template = "{{ enable_thinking }}{{ tools is none }}{{ documents is none }}"
    assert tokenizer.apply_chat_template(HI, chat_template=template, enable_thinking=False) == "FalseTrueTrue"


def test_a_template_that_refuses_is_the_callers_error_with_its_words() -> None:
    with pytest.raises(VLLMValidationError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "not valid Jinja"),
        ("{{ messages[0].content + none }}", "fails on this conversation"),
        ("{{ missing.field }}", "can't be rendered"),
        ("{{ ''.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}", "can't be rendered"),
        ("{{ messages.append(1) }}", "can't be rendered"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "fails on this conversation"),
        ("{{ 1 // 0 }}", "fails on this conversation"),
    ],
)
def test_broken_and_unsafe_templates_are_validation_errors(template: str, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        render(template)


def test_named_templates_are_chosen_by_name_and_by_tools(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "rag"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(HI) == "plain"
    assert tokenizer.apply_chat_template(HI, tools=[{"type": "function"}]) == "tools"
    assert tokenizer.apply_chat_template(HI, chat_template="rag") == "rag"


def test_template_files_stand_above_the_config(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load_tokenizer(tmp_path).apply_chat_template(HI) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag file")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(HI) == "from jinja"
    assert tokenizer.apply_chat_template(HI, chat_template="rag") == "rag file"


def test_templates_render_as_transformers_renders_them(tmp_path: pathlib.Path) -> None:
    from transformers import AutoTokenizer

    write_tiny_tokenizer(tmp_path)
    reference, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    conversation = [*HI, {"role": "assistant", "content": "é <b>\n"}, {"role": "user", "content": " x "}]
    tricky = (
        "{%- for m in messages %}\n  {%- if not loop.first %}, {% endif -%}\n{{ m | tojson }}\n{% endfor %}\n"
        "{{ bos_token }}{{ eos_token }}{% generation %}{{ messages[-1]['content'] }}{% endgeneration %}\n"
    )
    for template in (CHATML_TEMPLATE, INST_TEMPLATE, tricky):
        for prompts in (True, False):
            theirs = reference.apply_chat_template(
                conversation, chat_template=template, tokenize=False, add_generation_prompt=prompts
            )
            assert (
                ours.apply_chat_template(conversation, chat_template=template, add_generation_prompt=prompts) == theirs
            )
