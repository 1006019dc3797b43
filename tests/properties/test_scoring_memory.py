"""The memory of prompt logprobs: a fixed workspace, whatever the prompt's length, the vocabulary and the cache hold."""

import pathlib
import subprocess
import sys

import pytest

from tests.tiny_models import write_tiny_model

_SCRIPT = """
import sys, threading, time
from vllm import LLM, SamplingParams

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

class Peak:
    def __enter__(self):
        self.peak, self.is_over = resident(), False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.is_over:
            self.peak = max(self.peak, resident())
            time.sleep(0.002)
    def __exit__(self, *_):
        self.is_over = True
        self.thread.join()

options = {"kv_cache_memory_bytes": 1 << 30, "max_num_batched_tokens": 2048, "skip_tokenizer_init": True}
llm = LLM(sys.argv[1], max_model_len=8192, **options)
prompts = [{"prompt_token_ids": [(7 * i + 31 * j) % 150000 for i in range(8000)]} for j in range(4)]
plain = SamplingParams(max_tokens=1, temperature=0, detokenize=False, skip_reading_prefix_cache=True)
with Peak() as without:
    llm.generate(prompts, plain, use_tqdm=False)
asked = SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=1)
llm.generate({"prompt_token_ids": [1, 2, 3]}, asked, use_tqdm=False)
for name in ("cold", "cached"):
    outputs = None
    with Peak() as with_scores:
        outputs = llm.generate(prompts, asked, use_tqdm=False)
    answer = sum(array.nbytes for out in outputs for array in out.prompt_logprobs.to_arrays())
    print(name, (with_scores.peak - without.peak - answer) >> 20, llm.llm_engine.get_stats().num_cached_prompt_rows)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_four_long_prompts_over_a_large_vocabulary_take_the_workspace_and_no_more(tmp_path: pathlib.Path) -> None:
    folder = write_tiny_model(
        tmp_path / "model",
        vocab_size=150_000,
        num_hidden_layers=1,
        max_position_embeddings=8192,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        tokenizer=False,
    )
    done = subprocess.run([sys.executable, "-c", _SCRIPT, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = {name: (int(mib), int(known)) for name, mib, known in map(str.split, done.stdout.splitlines()[-2:])}
    assert figures["cold"][0] <= 64 and figures["cached"][0] <= 64, figures
    assert figures["cached"][1] > 4 * 7900
