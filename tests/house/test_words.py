"""Names are made of English words, of words of the glossary, or of vLLM's and the field's; retired words stay away.

A name that fails here: take a plainer word; else add an English word to tests/house/words.txt (in order), and a word of
our own, with its meaning, to docs/glossary.md.
"""

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Names and abbreviations of vLLM's interface, of Python's, and of the field.
VOCABULARY = frozenset(
    re.findall(
        r"\w+",
        """
        api app arch archs arg argmax args async attn avx bool bos cli config cpu cuda dataset dequantize detokenize
        detokenizer dict dim dtype enqueue entrypoint env envs eos exp ggml gguf goodput gpu gumbel hf http id info init
        inproc int io ip iter json k kv lifespan llama llm lm lo logit logprob lora middleware mistral mlp mp nccl norm
        nowait num numpy ok op openai openmp ops param params philox pid playground pre preempt prefill proc prometheus
        q qkv qwen ra ray req reqs rms rope rotary rpc safetensors sched silu simd spec sse stats str struct subcommand
        sync tanh token tokenizer topk topp torch tpot ttft uni uniproc unix utils uuid v vllm vocab
        """,
    )
)

# What is not a part of any name → what to say instead.
RETIRED = {
    "door": "admission, or entry point",
    "letter": "message",
    "ledger": "prompt-logprobs index",
    "backlog": "pending prompt logprobs",
    "steady": "decode batch",
    "quiet": "decode batch, or the negation of what is shown",
    "told": "reported",
    "tell": "report, describe",
    "owe": "pending",
    "owed": "pending",
    "unowed": "not pending",
    "has news": "has_metadata",
    "plan": "scheduler_output, or what the object holds",
    "planned": "scheduled",
    "made": "runner_output, or what the object holds",
    "foreign": "invalidate",
    "look again": "invalidate",
    "number type": "dtype",
    "factor block": "group scale",
    "side by side": "interleaved",
    "multiply few": "gemv",
}

# Names that others gave: an interface that calls us, or a library's.
OTHERS = frozenset({"connection_made", "quiet_NaN"})


class Name(NamedTuple):
    text: str
    kind: str
    where: str


def split_words(name: str) -> list[str]:
    """Return the words of a name in CamelCase or snake_case."""
    return [word.lower() for part in name.split("_") for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)]


def find_python_names() -> Iterator[Name]:
    """Yield the modules, classes, functions and fields of vllm/."""
    for path in sorted((ROOT / "vllm").rglob("*.py")):
        where = str(path.relative_to(ROOT))
        yield Name(path.stem if path.stem != "__init__" else path.parent.name, "module", where)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield Name(node.name, "class", where)
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        yield Name(item.target.id, "field", where)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Name(node.name, "function", where)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield Name(node.attr, "field", where)


def find_files_of_csrc() -> Iterator[Name]:
    for path in sorted((ROOT / "csrc").rglob("*.[ch]*")):
        yield Name(path.stem, "file", str(path.relative_to(ROOT)))


def find_identifiers_of_csrc() -> Iterator[Name]:
    """Yield every identifier of csrc/: only a compiler separates what is declared there from what is used."""
    for path in sorted((ROOT / "csrc").rglob("*.[ch]*")):
        code = re.sub(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', " ", path.read_text(), flags=re.DOTALL)
        for text in sorted(set(re.findall(r"[A-Za-z_]\w*", code))):
            yield Name(text, "identifier", str(path.relative_to(ROOT)))


def read_known_words() -> set[str]:
    """Return all words that a name may have; each stands for its inflections too."""
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    terms = [line.split("|")[1] for line in glossary.splitlines() if line.startswith("| ")]
    terms += re.findall(r"`([^`]+)`", glossary)
    words = {word.lower() for term in terms for word in re.findall(r"[A-Za-z]+", term)}
    families = (ROOT / "vllm" / "model_executor" / "families").glob("*.py")  # a family has its models' name
    words |= {word for path in families for word in split_words(path.stem)}
    english = (ROOT / "tests" / "house" / "words.txt").read_text().split()
    assert english == sorted(set(english)), "words.txt stands in alphabetical order, each word once"
    return words | set(english) | VOCABULARY


def find_bases(word: str) -> set[str]:
    """Return the words that this one may be an inflection of, itself included."""
    bases = {word}
    for ending in ("s", "es", "d", "ed", "ing", "er", "ers", "or", "ors", "able", "ation", "ly", "ion", "ment", "est"):
        if word.endswith(ending) and len(word) - len(ending) >= 2:
            stem = word.removesuffix(ending)
            bases |= {stem, stem + "e"}
            if stem[-1] == stem[-2]:
                bases.add(stem[:-1])  # running
            if stem[-1] == "i":
                bases.add(stem[:-1] + "y")  # copies
    return bases


def has_words(name: str, retired: str) -> bool:
    """Return whether a retired word, or several in a row, in singular or plural, are a part of a name."""
    words = [word.removesuffix("s") for word in split_words(name)]
    wanted = [word.removesuffix("s") for word in retired.split()]
    return any(words[i : i + len(wanted)] == wanted for i in range(len(words)))


def test_names_are_made_of_known_words() -> None:
    known = read_known_words() | set(RETIRED)  # the next test's
    unknown = []
    for name in [*find_python_names(), *find_files_of_csrc()]:
        if name.kind == "field" or (name.kind == "function" and name.text.startswith("_")):
            continue
        unknown += [
            f"{name.where}: {name.text}: {word}" for word in split_words(name.text) if not find_bases(word) & known
        ]
    assert not unknown, __doc__ + "\n".join(sorted(set(unknown)))


def test_retired_words_are_a_part_of_no_name() -> None:
    found = []
    for name in [*find_python_names(), *find_files_of_csrc(), *find_identifiers_of_csrc()]:
        if name.text in OTHERS:
            continue
        found += [f"{name.where}: {name.text}: say {RETIRED[word]}" for word in RETIRED if has_words(name.text, word)]
    assert not found, "\n".join(sorted(set(found)))


def test_words_are_split_and_recognised() -> None:
    """The test's own rules: without them it would pass whatever the names are."""
    assert split_words("KVCacheManager_of_2Rows") == ["kv", "cache", "manager", "of", "rows"]
    assert {"run", "copy", "schedule", "block", "make"} <= {
        base for word in ("running", "copies", "scheduled", "blocks", "maker") for base in find_bases(word)
    }
    assert has_words("make_decoder_of_letters", "letter") and has_words("NumberTypes", "number type")
    assert has_words("lookAgain", "look again") and not has_words("sort_numbers_by_type", "number type")
    assert not has_words("outdoors", "door") and not has_words("steadily", "steady")
    known = read_known_words()
    assert not find_bases("gronkle") & known and find_bases("tokenizers") & known
