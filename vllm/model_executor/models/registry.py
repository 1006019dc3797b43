"""Architecture name → family, and from a checkpoint to the shape of its decoder. No torch: the front end reads this."""

import importlib
import pathlib

from vllm.checkpoints import Checkpoint, Fields, open_gguf
from vllm.checkpoints.hf_config import refuse_quantization
from vllm.config import TransformerConfig
from vllm.exceptions import ModelLoadError
from vllm.model_executor.families.family import Family

_FAMILIES = "vllm.model_executor.families"

# Name in config.json's `architectures` → "module:Class" of a family, or such a class, or a model's class that names
# its family. Imported when somebody asks for it.
_REGISTERED: dict[str, str | type] = {
    "LlamaForCausalLM": f"{_FAMILIES}.llama:Llama",
    "MistralForCausalLM": f"{_FAMILIES}.mistral:Mistral",
    "Phi3ForCausalLM": f"{_FAMILIES}.phi3:Phi3",
    "Qwen2ForCausalLM": f"{_FAMILIES}.qwen2:Qwen2",
    "Qwen3ForCausalLM": f"{_FAMILIES}.qwen3:Qwen3",
}


class ModelRegistry:
    """What is served."""

    @staticmethod
    def get_supported_archs() -> list[str]:
        """Return the names that config.json's `architectures` may hold."""
        return list(_REGISTERED)

    @staticmethod
    def register_model(model_arch: str, model_cls: str | type) -> None:
        """Serve `model_arch`, or serve it in another way than so far.

        model_cls: a `Family`, or a model (docs/architecture.md, "a model family") whose class attribute `family` is
        one; or "module:Class" of either, imported when such a model is loaded.

        Raises:
            ValueError: a string that is not of this form.
        """
        if isinstance(model_cls, str) and not all(model_cls.partition(":")):
            raise ValueError(f"model_cls must be a class or 'module:Class'; got {model_cls!r}")
        _REGISTERED[model_arch] = model_cls

    @staticmethod
    def resolve(architecture: str) -> Family:
        """Return the family of `architecture`.

        Raises:
            ModelLoadError: it is not served (the message lists what is), or what was registered is no family.
        """
        if architecture not in _REGISTERED:
            raise ModelLoadError(f"architecture {architecture!r} is not served ({_describe_served()})")
        registered = _REGISTERED[architecture]
        found = import_class(registered) if isinstance(registered, str) else registered
        family = found if isinstance(found, type) and issubclass(found, Family) else getattr(found, "family", None)
        if not (isinstance(family, type) and issubclass(family, Family)):
            raise ModelLoadError(
                f"architecture {architecture!r} was registered as {found!r}, which must be a Family or a model class "
                "with a Family as its attribute `family`"
            )
        made = family()
        made.architecture = architecture
        if found is not family:
            made.model = f"{found.__module__}:{found.__qualname__}"
        return made


def import_class(name: str) -> type:
    """Return the class that "module:Class" names.

    Raises:
        ModelLoadError: it can't be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        found: type = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"{name}: can't be imported: {error}") from error
    return found


def read_transformer_config(checkpoint: Checkpoint) -> TransformerConfig:
    """Return the decoder's shape.

    Raises:
        ModelLoadError: an architecture or a feature that is not served, or a value that can't be; names the field.
    """
    if checkpoint.kind == "gguf":
        gguf = open_gguf(checkpoint.path)
        kind = gguf.metadata.get("general.architecture")
        families = map(ModelRegistry.resolve, _REGISTERED)
        family = next((f for f in families if kind is not None and f.gguf_architecture == kind), None)
        if family is None:
            raise ModelLoadError(
                f"{checkpoint.path}: general.architecture {kind!r} is not served ({_describe_served()})"
            )
        return family.read_gguf_config(gguf, Fields(gguf.metadata, str(gguf.path), prefix=f"{kind}."))
    folder = pathlib.Path(checkpoint.path)
    fields = Fields(checkpoint.config, str(folder / "config.json"))
    family = _find_family(fields)
    refuse_quantization(fields)
    return family.read_hf_config(fields, folder)


def _find_family(fields: Fields) -> Family:
    named = fields.values.get("architectures")
    if not named:  # written by hand or by old tools: the model type then says
        model_type = fields.values.get("model_type")
        families = map(ModelRegistry.resolve, _REGISTERED)
        named = [family.architecture for family in families if family.model_type == model_type] or [model_type]
    if not isinstance(named, list):
        raise fields.error("architectures", named, "must be a list of names")
    for name in named:
        if isinstance(name, str) and name in _REGISTERED:
            return ModelRegistry.resolve(name)
    raise fields.error("architectures", named, f"is not served ({_describe_served()})")


def _describe_served() -> str:
    """Return the list that error messages end with."""
    in_gguf = [kind for name in _REGISTERED if (kind := ModelRegistry.resolve(name).gguf_architecture)]
    return f"served: {', '.join(_REGISTERED)}; in .gguf files: {', '.join(in_gguf)}"
