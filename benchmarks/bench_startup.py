"""How long until it is ready? Process start to `LLM` returned and to a first token, beside `import torch`, alternating.

The clock stops when the program says that it is there, not when its process has ended.

python -m benchmarks.bench_startup MODEL [MODEL …] [--runs 5]
"""

import argparse
import subprocess
import sys
import time

from benchmarks.report import add_output_argument, quartiles, show

PROGRAMS = {
    "import torch": "import torch",
    "import vllm": "import vllm",
    "vllm --help": "from vllm.entrypoints.cli.main import main; main(['--help'])",
}
READY = "from vllm import LLM; LLM({model!r}, max_model_len=1024, max_num_seqs=16)"
FIRST_TOKEN = (
    "from vllm import LLM, SamplingParams; llm = LLM({model!r}, max_model_len=1024, max_num_seqs=16); "
    "llm.generate('The', SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)"
)


_THERE = "; print(flush=True)"


def time_program(code: str) -> float:
    """Return the seconds from the process's start to its first line."""
    start = time.perf_counter()
    command = [sys.executable, "-c", code + _THERE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seconds = time.perf_counter() - start
        process.communicate()
    if process.returncode:
        raise SystemExit(f"{code!r} ended with status {process.returncode}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--runs", type=int, default=5)
    add_output_argument(parser)
    args = parser.parse_args()
    programs = dict(PROGRAMS)
    for model in args.models:
        programs[f"LLM ready: {model}"] = READY.format(model=model)
        programs[f"first token: {model}"] = FIRST_TOKEN.format(model=model)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for run in range(args.runs + 1):
        for name, code in programs.items():
            taken = time_program(code)
            if run:  # the first round fills the page cache
                seconds[name].append(taken)
    torch_median = quartiles(seconds["import torch"])[1]
    rows = []
    for name, values in seconds.items():
        low, middle, high = quartiles(values)
        rows.append([name, middle, f"{low:.2f} – {high:.2f}", middle - torch_median])
    show("Start-up, seconds", ["what", "median", "quartiles", "beyond import torch"], rows, args.json)


if __name__ == "__main__":
    main()
