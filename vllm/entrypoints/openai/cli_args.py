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

_WORDS: dict[str, Any] = {"nargs": "+", "action": "extend"}
_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

# flag → its default, its help, and what argparse is told beside its type, which is the default's (text for None);
# a default of true or false makes a switch
_SERVER_FLAGS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "--host": ("127.0.0.1", "address to listen on; 0.0.0.0 for every network", {}),
    "--port": (8000, "port to listen on; 0 takes a free one", {}),
    "--uds": (None, "path of a unix socket to listen on, in place of host and port", {}),
    "--root-path": ("", "path under which a proxy shows the server", {}),
    "--api-key": ([], "keys, one of which a client must send (VLLM_API_KEY is one more)", _WORDS),
    "--allowed-origins": (["*"], "CORS: origins that a browser may use, as words or a JSON list", _WORDS),
    "--allowed-methods": (["*"], "CORS: methods that a browser may use, as words or a JSON list", _WORDS),
    "--allowed-headers": (["*"], "CORS: headers that a browser may use, as words or a JSON list", _WORDS),
    "--allow-credentials": (False, "CORS: let browsers send cookies and keys", {}),
    "--ssl-keyfile": (None, "key for TLS", {}),
    "--ssl-certfile": (None, "certificate for TLS", {}),
    "--ssl-ca-certs": (None, "certificates that clients must be signed by", {}),
    "--uvicorn-log-level": ("info", "what the HTTP server logs", {"choices": _LEVELS}),
    "--disable-uvicorn-access-log": (False, "no line in the log for each request", {}),
    "--disable-fastapi-docs": (False, "no /docs and no /openapi.json", {}),
    "--playground": (True, "the page for people at GET /", {}),
    "--enable-request-id-headers": (False, "send X-Request-Id back", {}),
    "--enable-server-load-tracking": (False, "accepted for vLLM's sake: /load always counts", {}),
    "--max-request-body-bytes": (DEFAULT_MAX_BODY_BYTES, "largest body of a request", {}),
    "--shutdown-timeout": (0.0, "seconds that running requests may still take at SIGTERM; 0 ends them", {}),
    "--sse-keep-alive-interval": (0.0, "seconds of silence after which a stream sends a comment; 0: never", {}),
}
_ANSWER_FLAGS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "--chat-template": (None, "file with a chat template, or the template itself, in place of the model's", {}),
    "--chat-template-content-format": (
        "auto",
        "how a template sees the parts of a message: as one string",
        {"choices": ("auto", "string")},
    ),
    "--trust-request-chat-template": (False, "let requests bring their own chat template (it is a program)", {}),
    "--response-role": ("assistant", "who speaks in a chat's answer", {}),
    "--return-tokens-as-token-ids": (False, 'name tokens "token_id:N" in logprobs', {}),
    "--enable-prompt-tokens-details": (False, "say in usage how many prompt tokens were cached", {}),
    "--enable-force-include-usage": (False, "end every stream with usage", {}),
    "--enable-tokenizer-info-endpoint": (True, "GET /tokenizer_info", {}),
    "--enable-log-requests": (False, "log prompts and parameters of requests: people's text", {}),
    "--enable-log-outputs": (False, "log answers that are not streamed: people's text", {}),
    "--max-log-len": (None, "characters or token ids of a prompt or answer in the log", {"type": int}),
}
DEFAULTS: dict[str, Any] = {
    **{flag[2:].replace("-", "_"): default for flag, (default, _, _) in (_SERVER_FLAGS | _ANSWER_FLAGS).items()},
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
    group = parser.add_argument_group("server")
    _add_flags(group, _SERVER_FLAGS)
    count: dict[str, Any] = {"type": int, "default": argparse.SUPPRESS, "metavar": "INT"}
    group.add_argument("--api-server-count", "-asc", help="must be 1", **count)
    _add_flags(parser.add_argument_group("answers"), _ANSWER_FLAGS)
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


def _add_flags(group: Any, flags: dict[str, tuple[Any, str, dict[str, Any]]]) -> None:
    for flag, (default, help_text, options) in flags.items():
        given: dict[str, Any] = {"default": argparse.SUPPRESS, **options}
        if isinstance(default, bool):
            given["action"] = argparse.BooleanOptionalAction
            shown = " (default: on)" if default else ""
        else:
            given.setdefault("type", type(default) if isinstance(default, int | float) else str)
            if "choices" not in given:
                given["metavar"] = given["type"].__name__.upper()
            shown = "" if default in (None, "", []) else f" (default: {default})"
        group.add_argument(flag, help=help_text + shown, **given)


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
