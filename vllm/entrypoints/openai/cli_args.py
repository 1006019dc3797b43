"""The flags of `vllm serve`: the server's own here, the engine's from `EngineArgs`, and a file that holds either.

No flag has a default in the parser, so that a given one can be distinguished from one that was not: a value from the
command line stands before one from the file. `with_defaults` fills in the rest.
"""

import argparse
import difflib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.cli_args import check_at_least
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError

DEFAULT_MAX_BODY_BYTES = 32 * 2**20  # 1,024 prompts of 4,096 token ids

DEFAULTS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 8000,
    "uds": None,
    "root_path": "",
    "api_key": [],
    "allowed_origins": ["*"],
    "allowed_methods": ["*"],
    "allowed_headers": ["*"],
    "allow_credentials": False,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "ssl_ca_certs": None,
    "uvicorn_log_level": "info",
    "disable_uvicorn_access_log": False,
    "disable_fastapi_docs": False,
    "playground": True,
    "enable_request_id_headers": False,
    "enable_server_load_tracking": False,
    "enable_tokenizer_info_endpoint": True,
    "enable_prompt_tokens_details": False,
    "enable_force_include_usage": False,
    "enable_log_outputs": False,
    "enable_log_requests": False,
    "max_log_len": None,
    "chat_template": None,
    "chat_template_content_format": "auto",
    "trust_request_chat_template": False,
    "response_role": "assistant",
    "return_tokens_as_token_ids": False,
    "sse_keep_alive_interval": 0.0,
    "max_request_body_bytes": DEFAULT_MAX_BODY_BYTES,
    "shutdown_timeout": 0.0,
    "api_server_count": 1,
}

# Flags of vLLM's server for what this one doesn't do.
UNSERVED_FLAGS = (
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "--tool-parser-plugin",
    "--enable-per-request-metrics",
    "--tokens-only",
    "--enable-scale-out",
    "--headless",
    "--grpc",
    "--middleware",
    "--fingerprint-mode",
    "--lora-modules",
)

# The engine's flags that have a short form, or that this file reads in its own way.
_ENGINE_SHORT_FLAGS: dict[str, tuple[str, type]] = {
    "tensor_parallel_size": ("-tp", int),
    "pipeline_parallel_size": ("-pp", int),
    "data_parallel_size": ("-dp", int),
    "quantization": ("-q", str),
    "speculative_config": ("-sc", str),
    "compilation_config": ("-cc", str),
    "optimization_level": ("-O", str),
}


def add_serve_args(parser: argparse.ArgumentParser) -> None:
    """Give `parser` all flags of `vllm serve`."""
    parser.usage = "%(prog)s MODEL [flags]; --help lists them"
    parser.add_argument(
        "model_tag", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="a folder, a .gguf file or a hub id"
    )
    parser.add_argument(
        "--config", action=_ReadConfigFile, default=argparse.SUPPRESS, metavar="FILE.yaml", help="flags, by their names"
    )
    _add_network_flags(parser)
    _add_answer_flags(parser)
    for flag in UNSERVED_FLAGS:
        parser.add_argument(flag, action=_RefuseFlag, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    AsyncEngineArgs.add_cli_args(
        parser, leave_out=(*_ENGINE_SHORT_FLAGS, "served_model_name", "shutdown_timeout", "enable_log_requests")
    )
    group = parser.add_argument_group("engine, continued")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="the names that clients use",
    )
    for name, (short, kind) in _ENGINE_SHORT_FLAGS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, short, dest=name, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Return the parsed arguments with the defaults of those that were not given, checked.

    Raises:
        VLLMValidationError: no model, two models, or a value that breaks a rule.
    """
    given = vars(args)
    settings = argparse.Namespace(**{**DEFAULTS, **given.get("from_file", {}), **given})
    models = {getattr(settings, name) for name in ("model_tag", "model") if getattr(settings, name, None)}
    if len(models) != 1:
        what = (
            "which model? `vllm serve MODEL`"
            if not models
            else f"two models were given: {' and '.join(sorted(models))}"
        )
        raise VLLMValidationError(what)
    settings.model = models.pop()
    check_at_least(settings, port=0, max_request_body_bytes=1, sse_keep_alive_interval=0, shutdown_timeout=0)
    if settings.port > 65535:
        raise VLLMValidationError(f"--port must be at most 65535; got {settings.port}")
    if settings.api_server_count != 1:
        raise VLLMUnsupportedError("--api-server-count is not supported: one process answers everything; use 1")
    if bool(settings.ssl_keyfile) != bool(settings.ssl_certfile):
        raise VLLMValidationError("--ssl-keyfile and --ssl-certfile belong together: give both or neither")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(settings, name)
        if path and not pathlib.Path(path).is_file():
            raise VLLMValidationError(f"--{name.replace('_', '-')}: there is no file {path}")
    return settings


def read_chat_template(given: str | None) -> str | None:
    """Return the template that `--chat-template` names: a file's content, or the flag's own text.

    Raises:
        VLLMValidationError: it is neither.
    """
    if given is None:
        return None
    if "{" in given or "\n" in given:
        return given
    try:
        return pathlib.Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VLLMValidationError(f"--chat-template: {given} can't be read: {error}") from None


def _add_network_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    _add(group, "--host", "address to listen on; 0.0.0.0 for every network")
    _add(group, "--port", "port to listen on; 0 takes a free one", kind=int)
    _add(group, "--uds", "path of a unix socket to listen on, in place of host and port")
    _add(group, "--root-path", "path under which a proxy shows the server")
    words: dict[str, Any] = {"nargs": "+", "action": "extend"}
    _add(group, "--api-key", "keys, one of which a client must send (VLLM_API_KEY is one more)", **words)
    for name in ("origins", "methods", "headers"):
        _add(group, f"--allowed-{name}", f"CORS: {name} that a browser may use, as words or a JSON list", **words)
    _add_switch(group, "--allow-credentials", "CORS: let browsers send cookies and keys")
    _add(group, "--ssl-keyfile", "key for TLS")
    _add(group, "--ssl-certfile", "certificate for TLS")
    _add(group, "--ssl-ca-certs", "certificates that clients must be signed by")
    levels = ("critical", "error", "warning", "info", "debug", "trace")
    _add(group, "--uvicorn-log-level", "what the HTTP server logs", choices=levels)
    _add_switch(group, "--disable-uvicorn-access-log", "no line in the log for each request")
    _add_switch(group, "--disable-fastapi-docs", "no /docs and no /openapi.json")
    _add_switch(group, "--playground", "the page for people at GET /")
    _add_switch(group, "--enable-request-id-headers", "send X-Request-Id back")
    _add_switch(group, "--enable-server-load-tracking", "accepted for vLLM's sake: /load always counts")
    _add(group, "--max-request-body-bytes", "largest body of a request", kind=int)
    seconds = {"--shutdown-timeout": "seconds that running requests may still take at SIGTERM; 0 ends them"}
    seconds["--sse-keep-alive-interval"] = "seconds of silence after which a stream sends a comment; 0: never"
    for flag, help_text in seconds.items():
        _add(group, flag, help_text, kind=float)
    count: dict[str, Any] = {"type": int, "default": argparse.SUPPRESS, "metavar": "INT"}
    group.add_argument("--api-server-count", "-asc", help="must be 1", **count)


def _add_answer_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answers")
    _add(group, "--chat-template", "file with a chat template, or the template itself, in place of the model's")
    parts = "how a template sees the parts of a message: as one string"
    _add(group, "--chat-template-content-format", parts, choices=("auto", "string"))
    _add_switch(group, "--trust-request-chat-template", "let requests bring their own chat template (it is a program)")
    _add(group, "--response-role", "who speaks in a chat's answer")
    _add_switch(group, "--return-tokens-as-token-ids", 'name tokens "token_id:N" in logprobs')
    _add_switch(group, "--enable-prompt-tokens-details", "say in usage how many prompt tokens were cached")
    _add_switch(group, "--enable-force-include-usage", "end every stream with usage")
    _add_switch(group, "--enable-tokenizer-info-endpoint", "GET /tokenizer_info")
    _add_switch(group, "--enable-log-requests", "log prompts and parameters of requests: people's text")
    _add_switch(group, "--enable-log-outputs", "log answers that are not streamed: people's text")
    _add(group, "--max-log-len", "characters or token ids of a prompt or answer in the log", kind=int)


def _add(group: Any, flag: str, help_text: str, *, kind: type = str, **options: Any) -> None:
    default = DEFAULTS[flag[2:].replace("-", "_")]
    shown = "" if default in (None, "", []) else f" (default: {default})"
    if "choices" not in options:
        options["metavar"] = kind.__name__.upper()
    group.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=help_text + shown, **options)


def _add_switch(group: Any, flag: str, help_text: str) -> None:
    shown = " (default: on)" if DEFAULTS[flag[2:].replace("-", "_")] else ""
    group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text + shown)


class _RefuseFlag(argparse.Action):
    """A flag that vLLM has and this server ignores."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise VLLMUnsupportedError(f"{option_string} is not supported by this server; leave it out")


class _ReadConfigFile(argparse.Action):
    """Reads flags from a YAML file; those of the command line stand before them, wherever it stands."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        argv = read_config_file(pathlib.Path(values), parser)
        namespace.from_file = vars(parser.parse_args(argv))


def read_config_file(path: pathlib.Path, parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags that a YAML file holds, as a command line.

    Raises:
        VLLMValidationError: it can't be read, or names a flag that `parser` doesn't know.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise VLLMValidationError(f"--config: {path} can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise VLLMValidationError(f"--config: {path} must hold flags and their values, such as `port: 8000`")
    argv: list[str] = []
    for key, value in content.items():
        argv += _as_flag(path, str(key).lstrip("-").replace("_", "-"), value, parser)
    return argv


def _as_flag(path: pathlib.Path, key: str, value: Any, parser: argparse.ArgumentParser) -> Sequence[str]:
    flag = "--model" if key in ("model", "model-tag") else f"--{key}"
    known = parser._option_string_actions
    if flag not in known or flag in ("--config", "--help"):
        near = difflib.get_close_matches(flag, known, n=1)
        hint = f"; did you mean {near[0].lstrip('-')!r}?" if near else ""
        raise VLLMValidationError(f"--config: {path} has an unknown key {key!r}{hint}")
    if value is None:
        return ()
    if isinstance(value, bool):
        negated = f"--no-{key}"
        if negated not in known:
            return (flag, str(value).lower())
        return (flag,) if value else (negated,)
    if isinstance(value, list):
        return (flag, *map(str, value))
    return (flag, json.dumps(value) if isinstance(value, dict) else str(value))
