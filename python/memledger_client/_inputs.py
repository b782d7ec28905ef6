"""Inputs for a batch size, from what a model was called with or has with it, where the program gives no ``sample``."""

import copy
import weakref
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple

from memledger_client import _model_memory
from memledger_client._bounded import HostMemoryError, bounded
from memledger_client._cleanup import is_capturing
from memledger_client._guard import is_traced, record_error
from memledger_client._host_memory import host_memory
from memledger_client._model_memory import Sample

#: Rows of a batch that are remembered, in the host's memory.
MAX_ROWS = 2
#: Tokens of a text where nothing says how long those of the training are: the longest that the model takes, and at most these.
MAX_TOKENS = 1024
#: Endings of Hugging Face's classes whose labels are the input ids.
LANGUAGE_MODELS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM")

NEEDS_SAMPLE = (
    "its inputs cannot be inferred: give sample=, a function that makes the model's inputs for a batch size, such as lambda size: torch.randn(size, 3, 224, 224);"
    " or call this again after the model's next batch, whose inputs are remembered"
)

#: What a first layer gets where it says less: edges of images that models are made for, steps of a series, rows and tokens.
IMAGE_EDGES = (224, 32, 28, 64, 96, 128, 256, 299, 384, 512)
VOLUME_EDGES = (64, 32, 128)
SERIES_LENGTHS = (128, 1024, 16000)
#: Samples of the pass that shows whether a model takes such inputs.
TRIED = 2

#: Inputs of one call of each model: positional, and by name.
_inputs: "weakref.WeakKeyDictionary[Any, Tuple[Tuple[Any, ...], Dict[str, Any]]]" = weakref.WeakKeyDictionary()


class _Rows(NamedTuple):
    """Rows of a batch. Everything else is the same for batches of any size."""

    tensor: Any


def sample_of(model: Any) -> Tuple[Sample, str]:
    """Returns a function that makes inputs for a batch size, and where they come from.

    In this order: those of an earlier batch, what the model has with it, what its configuration or its first layer take, which is assumed.
    Raises ValueError where there are none. Remembers those of the next call, if it has seen no batch yet.
    """
    if model in _inputs:
        return _sample(*_inputs[model]), "with inputs like those of an earlier batch"
    example = getattr(model, "example_input_array", None)  # Lightning's
    if example is not None:
        arguments, named = ((), example) if isinstance(example, dict) else (example if isinstance(example, tuple) else (example,), {})
        return _sample(*_rows_of(arguments, named)), "with the model's example_input_array"
    _remember_next(model)
    for shape, sample in _assumed(model):
        sample = _in_type_of(model, sample)
        if _takes(model, sample):
            return sample, f"with inputs that are assumed, {shape}: give sample= for those of the training"
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


def _assumed(model: Any) -> Iterator[Tuple[str, Sample]]:
    """Gives inputs that the model may take, the most likely first."""
    found = _texts(model) or _images(model)
    if found is not None:
        yield found
    layer = next((each for each in model.modules() if next(each.parameters(recurse=False), None) is not None), None)
    if layer is not None:
        yield from _of_first_layer(layer)


def _texts(model: Any) -> Optional[Tuple[str, Sample]]:
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

    return f"texts of {length} tokens", sample


def _images(model: Any) -> Optional[Tuple[str, Sample]]:
    """Returns inputs for an image model of Hugging Face's."""
    config = getattr(model, "config", None)
    edge, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if getattr(model, "main_input_name", "") != "pixel_values" or not isinstance(channels, int):
        return None
    height, width = edge if isinstance(edge, (list, tuple)) else (edge if isinstance(edge, int) else IMAGE_EDGES[0],) * 2
    return _zeros((channels, height, width), lambda inputs: {"pixel_values": inputs})


def _of_first_layer(layer: Any) -> Iterator[Tuple[str, Sample]]:
    """Gives inputs for the first layer of a model that has parameters, by what it is."""
    names = {each.__name__ for each in type(layer).__mro__}
    channels = getattr(layer, "in_channels", None)
    if channels is not None:
        dimensions = len(getattr(layer, "kernel_size", ()))
        edges = {1: SERIES_LENGTHS, 2: IMAGE_EDGES, 3: VOLUME_EDGES}.get(dimensions, ())
        for edge in edges:
            yield _zeros((channels, *(edge,) * dimensions))
    elif "num_embeddings" in vars(layer):
        for length in (128, 1):
            yield _zeros((length,), is_token=True)
        yield _zeros((), is_token=True)
    elif "RNNBase" in names:
        yield _zeros((SERIES_LENGTHS[0], layer.input_size))
    elif getattr(layer, "in_features", None) is not None:
        yield _zeros((layer.in_features,))
        yield _zeros((SERIES_LENGTHS[0], layer.in_features))
    elif getattr(layer, "num_features", None) is not None:  # of a norm
        for shape in ((layer.num_features,), (layer.num_features, SERIES_LENGTHS[0])):
            yield _zeros(shape)
        for edge in IMAGE_EDGES:
            yield _zeros((layer.num_features, edge, edge))
    elif isinstance(getattr(layer, "normalized_shape", None), tuple):
        yield _zeros((SERIES_LENGTHS[0], *layer.normalized_shape))


def _zeros(shape: Tuple[int, ...], named: Any = lambda inputs: inputs, is_token: bool = False) -> Tuple[str, Sample]:
    def sample(size: int) -> Any:
        import torch

        return named(torch.zeros((size, *shape), dtype=torch.long if is_token else torch.get_default_dtype(), device="cpu"))

    words = " x ".join(map(str, shape)) or "1"
    return f"{words} {'tokens' if is_token else 'numbers'} a sample", sample


def _in_type_of(model: Any, sample: Sample) -> Sample:
    """Returns a function for inputs in the type of the model's parameters, such as bfloat16."""
    kinds = [each.dtype for each in model.parameters() if each.dtype.is_floating_point]
    return (lambda size: _model_memory.in_type(sample(size), kinds[0])) if kinds else sample


def _takes(model: Any, sample: Sample) -> bool:
    """Returns whether the model takes these inputs. Also where only the memory does not suffice: the measurement says that."""
    import torch

    try:
        with bounded(host_memory()), torch.no_grad():
            tried = _on_cpu(model)
            with _model_memory.unchanged(tried):
                _model_memory.call(tried, sample(TRIED))
    except HostMemoryError:
        return all(each.device.type == "cpu" for each in model.parameters())
    except Exception:  # of any layer, which takes another shape
        return False
    return True


def _on_cpu(model: Any) -> Any:
    """Returns the model, or a copy of it on the CPU: on a GPU an index out of range ends the CUDA context of the program."""
    import torch

    tensors = [each for each in (*model.parameters(), *model.buffers()) if each.device.type != "cpu"]
    if not tensors:
        return model
    parameters = {id(each) for each in model.parameters()}

    def moved(tensor: Any) -> Any:
        copied = tensor.detach().cpu()
        return torch.nn.Parameter(copied, requires_grad=False) if id(tensor) in parameters else copied

    return copy.deepcopy(model, {id(each): moved(each) for each in tensors})


class _InputRecorder:
    """Keeps the inputs of the model's next call, and removes itself. A copy of the model has a copy of it, which does the same."""

    def __call__(self, module: Any, arguments: Any, named: Optional[Dict[str, Any]] = None) -> None:
        if is_traced() or is_capturing() or _model_memory.is_measuring():
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
