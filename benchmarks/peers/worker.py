"""One engine in a process of its own: commands come as JSON lines on stdin, answers leave as JSON lines on stdout.

The same file runs under every engine's own Python, by its path; so it imports nothing of this project, and of its
engine only what that engine needs. `vllm` is whatever that Python calls so: this project, or the original.
"""

import ctypes
import json
import os
import pathlib
import random
import signal
import sys
import time

MAX_MODEL_LEN = 2048
FIRST_ID, END_ID = 1000, 40000  # ordinary tokens of the vocabularies in question


def make_prompts(command):
    draw = random.Random(command["seed"])
    return [
        [draw.randrange(FIRST_ID, END_ID) for _ in range(command["input_len"])] for _ in range(command["num_prompts"])
    ]


class Clock:
    def __init__(self):
        self.start = time.perf_counter()

    def read(self):
        return time.perf_counter() - self.start


class VllmEngine:
    """Anything with vLLM's interface."""

    def __init__(self, model, options):
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.llm = LLM(
            model=model, max_model_len=MAX_MODEL_LEN, max_num_seqs=64, enable_prefix_caching=False, **options
        )
        self.num_requests = 0

    def run(self, command):
        prompts = [{"prompt_token_ids": ids} for ids in make_prompts(command)]
        return getattr(self, f"run_{command['kind']}")(prompts, command)

    def make_params(self, command, **others):
        settings = {"temperature": 0.0, "max_tokens": command["output_len"], "ignore_eos": True, "detokenize": True}
        settings |= {name: command[name] for name in ("logprobs", "prompt_logprobs")}
        return self.params(**settings | others)

    def generate(self, prompts, params):
        clock = Clock()
        self.llm.generate(prompts, params, use_tqdm=False)
        return clock.read()

    def run_output(self, prompts, command):
        return {"seconds": self.generate(prompts, self.make_params(command))}

    run_prompt = run_output

    def run_decode(self, prompts, command):
        """Time from the first token's step to the last one's."""
        engine = self.llm.llm_engine
        self.num_requests += 1
        engine.add_request(f"stream-{self.num_requests}", prompts[0], self.make_params(command))
        clock = None
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if clock is None and any(output.outputs and output.outputs[0].token_ids for output in outputs):
                clock = Clock()
        return {"seconds": clock.read()}

    def run_fan_out(self, prompts, command):
        one, many = (self.make_params(command, temperature=1.0, n=n) for n in (1, 16))
        alone = min(self.generate(prompts, one) for _ in range(2))
        return {"ratio": self.generate(prompts, many) / alone}

    def run_memory(self, prompts, command):
        """The peak with prompt_logprobs beyond the peak without; of this process and those that it started."""
        plain = self.make_params(command, prompt_logprobs=None)
        for _ in range(2):
            reset_peaks()
            self.generate(prompts, plain)
        before = read_peaks()
        reset_peaks()
        self.generate(prompts, self.make_params(command))
        return {"mib": read_peaks() - before}


class HfEngine:
    """transformers' own greedy generation."""

    def __init__(self, model, options):
        import torch
        import transformers

        self.torch = torch
        transformers.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options["dtype"]))
        self.model.eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def run(self, command):
        if command["kind"] not in ("output", "decode", "prompt") or command["logprobs"] is not None:
            return None
        with self.torch.inference_mode():
            ids = self.torch.tensor(make_prompts(command))
            if command["prompt_logprobs"] is not None:
                return {"seconds": self.score(ids, command["prompt_logprobs"])}
            arrivals = Arrivals() if command["kind"] == "decode" else None
            clock = Clock()
            self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=command["output_len"],
                do_sample=False,
                streamer=arrivals,
            )
            return {"seconds": clock.read() if arrivals is None else arrivals.times[-1] - arrivals.times[0]}

    def score(self, ids, num_top):
        clock = Clock()
        for row in ids:  # a prompt at a time: the logits of all together would be gigabytes
            scores = self.model(row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            scores.gather(1, row[1:, None])
            scores.topk(num_top, dim=-1)
        return clock.read()


class Arrivals:
    """What transformers calls a streamer: it gets the prompt, then each token."""

    def __init__(self):
        self.times = []
        self.has_prompt = False

    def put(self, _):
        if self.has_prompt:
            self.times.append(time.perf_counter())
        self.has_prompt = True

    def end(self):
        pass


class LlamaEngine:
    """llama.cpp on a .gguf file, a sequence at a time."""

    def __init__(self, model, options):
        import llama_cpp

        num_threads = len(os.sched_getaffinity(0))
        self.llama = llama_cpp.Llama(
            model, n_ctx=MAX_MODEL_LEN, n_threads=num_threads, n_threads_batch=num_threads, verbose=False
        )

    def run(self, command):
        if command["kind"] not in ("decode", "prompt") or command["prompt_logprobs"] is not None:
            return None
        prompts = make_prompts(command)
        clock = Clock()
        if command["kind"] == "prompt":
            for ids in prompts:
                self.llama.reset()
                self.llama.eval(ids)
                self.llama.sample(temp=0.0)
            return {"seconds": clock.read()}
        self.llama.reset()
        tokens = self.llama.generate(prompts[0], temp=0.0)
        next(tokens)
        clock = Clock()
        for _ in range(command["output_len"] - 1):
            next(tokens)
        return {"seconds": clock.read()}


class Probe:
    """What the machine gives at the moment: GB/s of reading what no cache holds, GFLOP/s of a large product."""

    def __init__(self, model, options):
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.torch = torch
        self.memory = torch.ones(96 << 20)  # 384 MiB
        self.left, self.right = torch.randn(1536, 1536), torch.randn(1536, 1536)

    def run(self, command):
        read = self.time(self.memory.sum)
        multiply = self.time(lambda: self.torch.mm(self.left, self.right))
        return {"gb_per_s": self.memory.nbytes / read / 1e9, "gflop_per_s": 2 * 1536**3 / multiply / 1e9}

    @staticmethod
    def time(compute):
        """The median of five: neither a stumble nor a burst."""
        times = []
        for _ in range(5):
            clock = Clock()
            compute()
            times.append(clock.read())
        return sorted(times)[2]


def find_own_processes():
    """This process and those that it started, theirs included."""
    parents = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    own = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in own and pid not in own}:
        own |= found
    return own


def reset_peaks():
    for pid in find_own_processes():
        pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")


def read_peaks():
    """The largest resident sizes since reset_peaks, added up, in MiB."""
    total = 0
    for pid in find_own_processes():
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1])
    return total / 1024


ENGINES = {"vllm": VllmEngine, "hf": HfEngine, "llama": LlamaEngine, "probe": Probe}


def end_with_parent():
    """Nothing wakes a sleeping engine once the driver was killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main():
    end_with_parent()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print must not come between the answers

    def answer(message):
        print(json.dumps(message), file=channel, flush=True)

    engine = ENGINES[sys.argv[1]](sys.argv[2], json.loads(sys.argv[3]))
    answer({"ready": True})
    for line in sys.stdin:
        answer(engine.run(json.loads(line)))


if __name__ == "__main__":
    main()
