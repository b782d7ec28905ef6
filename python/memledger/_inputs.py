"""Inputs for a batch size, from what a model was called with or has with it, where the program gives no ``sample``."""

import weakref
from typing import Any, Dict, NamedTuple, Optional, Tuple

from memledger import _model_memory
from memledger._cleanup import is_capturing
from memledger._guard import is_traced, record_error
from memledger._model_memory import Sample

#: Rows of a batch that are remembered, in the host's memory.
MAX_ROWS = 2
#: Tokens of a text where nothing says how long those of the training are: the longest that the model takes, and at most these.
MAX_TOKENS = 1024
#: Endings of Hugging Face's classes whose labels are the input ids.
LANGUAGE_MODELS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM")

NEEDS_SAMPLE = (
    "give sample=, a function that makes the model's inputs for a batch size, such as lambda size: torch.randn(size, 3, 224, 224);"
    " or call this again after the model's next batch, whose inputs are remembered"
)

#: Inputs of one call of each model: positional, and by name.
_inputs: "weakref.WeakKeyDictionary[Any, Tuple[Tuple[Any, ...], Dict[str, Any]]]" = weakref.WeakKeyDictionary()


class _Rows(NamedTuple):
    """Rows of a batch. Everything else is the same for batches of any size."""

    tensor: Any


def sample_of(model: Any) -> Tuple[Sample, str]:
    """Returns a function that makes inputs for a batch size, and where they come from.

    Raises ValueError where there are none, and remembers those of the next call.
    """
    if model in _inputs:
        return _sample(*_inputs[model]), "with inputs like those of an earlier batch"
    example = getattr(model, "example_input_array", None)  # Lightning's
    if example is not None:
        arguments, named = ((), example) if isinstance(example, dict) else (example if isinstance(example, tuple) else (example,), {})
        return _sample(*_rows_of(arguments, named)), "with the model's example_input_array"
    texts = _texts(model)
    if texts is not None:
        return texts
    _remember_next(model)
    raise ValueError(NEEDS_SAMPLE)


def _map(value: Any, change: Any) -> Any:
    """Returns nested containers with each other value changed."""
    if isinstance(value, _Rows) or not isinstance(value, (dict, tuple, list)):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(each, change) for key, each in value.items()}
    changed = [_map(each, change) for each in value]
    return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)


def _rows_of(arguments: Tuple[Any, ...], named: Dict[str, Any]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """Returns the first rows of what is as long as the first tensor, in the host's memory."""
    tensors = [each for each in _model_memory.tensors_in([list(arguments), named]) if each.dim() > 0]
    length = tensors[0].shape[0] if tensors else 0

    def kept(value: Any) -> Any:
        if not hasattr(value, "element_size"):
            return value
        is_batch = value.dim() > 0 and value.shape[0] == length
        copy = (value[:MAX_ROWS] if is_batch else value).detach().cpu().clone()
        return _Rows(copy) if is_batch else copy

    return _map(arguments, kept), _map(named, kept)


def _sample(arguments: Tuple[Any, ...], named: Dict[str, Any]) -> Sample:
    def sample(size: int) -> Any:
        def resized(value: Any) -> Any:
            if not isinstance(value, _Rows):
                return value
            tensor = value.tensor
            return tensor.repeat((-(-size // tensor.shape[0]),) + (1,) * (tensor.dim() - 1))[:size]

        return _model_memory.Call(_map(arguments, resized), _map(named, resized))

    return sample


def _texts(model: Any) -> Optional[Tuple[Sample, str]]:
    """Returns inputs for a text model of Hugging Face's. Its ``dummy_inputs`` have 5 tokens, which say little."""
    dummy, config = getattr(model, "dummy_inputs", None), getattr(model, "config", None)
    if not isinstance(dummy, dict) or set(dummy) != {"input_ids"} or getattr(model, "main_input_name", "") != "input_ids":
        return None
    length = min(getattr(config, "max_position_embeddings", None) or MAX_TOKENS, MAX_TOKENS)
    tokens = dummy["input_ids"]
    row = tokens[:1].repeat((1, -(-length // tokens.shape[1])))[:, :length]

    def sample(size: int) -> Any:
        inputs = {"input_ids": row.repeat((size, 1))}
        if type(model).__name__.endswith(LANGUAGE_MODELS):
            inputs["labels"] = inputs["input_ids"]
        return inputs

    return sample, f"with texts of {length} tokens: give sample= for those of the training"


class _InputRecorder:
    """Keeps the inputs of the model's next call, and removes itself. A copy of the model has a copy of it, which does the same."""

    def __call__(self, module: Any, arguments: Any, named: Optional[Dict[str, Any]] = None) -> None:
        if is_traced() or is_capturing():
            return
        try:
            for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _InputRecorder)]:
                module._forward_pre_hooks.pop(key)
                getattr(module, "_forward_pre_hooks_with_kwargs", {}).pop(key, None)
            _inputs[module] = _rows_of(arguments, named or {})
        except Exception:
            record_error()


def _remember_next(model: Any) -> None:
    if any(isinstance(hook, _InputRecorder) for hook in model._forward_pre_hooks.values()):
        return
    try:
        model.register_forward_pre_hook(_InputRecorder(), with_kwargs=True)
    except TypeError:  # before torch 2.0
        model.register_forward_pre_hook(_InputRecorder())
