"""The client beside the real torch, on the CPU: `make test-torch`. Not part of `make test`, because torch is 5 GB.

Here are the parts that the stand-in cannot prove: bytes of real modules, DataLoader workers, torchrun, and the import hook.
"""

import copy
import dataclasses
import json
import os
import pathlib
import pickle
import subprocess
import sys
import weakref

import pytest
from conftest import ROOT, eventually

torch = pytest.importorskip("torch")
import memledger_client  # noqa: E402 # where torch is
from memledger_client import _inputs, _model_memory, _peaks, _training_memory, analyze  # noqa: E402
from memledger_client.analyze import training_memory  # noqa: E402
from memledger_client.compat import auto_select_batch_size, recommend_batch_size  # noqa: E402
assert not hasattr(torch, "IS_STANDIN"), "these tests are for the real torch"

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "deploy/examples"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_dataloader_training_reports_while_its_workers_do_not(receiver, run, tmp_path, method):
    script = tmp_path / "start.py"
    script.write_text(
        f"""
import sys, torch.multiprocessing
sys.path.insert(0, {str(EXAMPLES)!r})
import memledger_client, train_reported
load = train_reported.Images.__getitem__
train_reported.Images.__getitem__ = memledger_client.track("data", "item")(load)  # called in the workers
if __name__ == "__main__":
    torch.multiprocessing.set_start_method("{method}")
    train_reported.main()
"""
    )
    program = run(str(script), path=(ROOT,), arguments=(), environment={"STEPS": "20", "BATCH_SIZE": "8"})
    code, out, err = program.end()
    assert (code, err) == (0, "") and "cpu_ram_bytes" in out
    assert receiver.wait("step", lambda message: message["n"] == 20)["samples"] == 160
    operations = {message["operation"] for message in receiver.of("operation")}
    assert operations == {"load", "forward", "backward"}
    assert {pid for pid, _ in receiver.messages} == {program.pid}
    assert (tmp_path / "memory_usage.json").exists()


def test_unmodified_training_is_not_disturbed_by_the_import_hook(receiver, run):
    environment = {"STEPS": "5", "BATCH_SIZE": "4"}
    program = run(str(EXAMPLES / "train.py"), path=(ROOT,), arguments=(), environment=environment)
    code, out, err = program.end()
    assert (code, err, out.splitlines()[-1]) == (0, "", "done")
    assert receiver.messages == []  # no GPU, so CUDA is never initialised
    text = "import torch; assert torch.__spec__.loader.get_source('torch'); print(len(torch.cuda._queued_calls))"
    queued = [int(run(text, path=path).end()[1]) for path in ((ROOT,), ())]
    assert queued[0] == queued[1] + 1  # torch itself will call the client when CUDA is initialised


def test_torchrun_with_four_gloo_ranks(receiver, run, tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(
        """
import memledger_client, torch, torch.distributed as distributed
distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(5):
    model(torch.ones(2, 4)).sum().backward()
    memledger_client.step(batch_size=2)
distributed.destroy_process_group()
"""
    )
    arguments = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    program = run(str(script), path=(ROOT,), arguments=arguments, environment={"OMP_NUM_THREADS": "1"})
    assert program.process.wait(120) == 0

    def all_ranks():
        ranks = {pid: message.get("local_rank") for pid, message in receiver.messages if message["t"] == "hello"}
        done = [pid for pid, message in receiver.messages if message["t"] == "step" and message["n"] == 5]
        return sorted(ranks[pid] for pid in done) == [0, 1, 2, 3]

    eventually("all ranks to report all steps", all_ranks)


def test_error_of_the_real_class_is_reported_with_its_text(receiver, run):
    """Without a GPU torch cannot run out of its memory: the program raises torch's own class with torch's own words."""
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.81 GiB is free."
    program = run(f"import memledger_client, torch\nmemledger_client.start()\nmemledger_client.step()\nraise torch.OutOfMemoryError({text!r})\n", path=(ROOT,))
    code, _, err = program.end()
    assert code == 1 and err.rstrip().endswith(f"torch.OutOfMemoryError: {text}")
    message = receiver.wait("oom")
    assert message["uncaught"] and message["text"] == text


def test_cleanup_without_a_gpu_gives_nothing_back_and_initialises_nothing(receiver, run):
    program = run(
        """
import memledger_client, torch
memledger_client.start()
memledger_client.cleanup_on("step", every=1)
for _ in range(5):
    memledger_client.step()
print(memledger_client.cleanup(), torch.cuda.is_initialized(), flush=True)
""",
        path=(ROOT,),
    )
    assert program.end() == (0, "None False\n", "")
    assert receiver.wait("step", lambda message: message["n"] == 5)


def test_shutdown_frees_and_ends_by_the_signal(receiver, run):
    program = run(
        """
import memledger_client, signal, torch
memledger_client.start()
memledger_client.install_shutdown()
model = torch.nn.Linear(4, 4)
print("ready", flush=True)
while True:
    model(torch.ones(2, 4)).sum().backward()
    memledger_client.step()
""",
        path=(ROOT,),
    )
    assert program.line() == "ready"
    receiver.wait("step")
    program.process.terminate()
    assert program.end()[0] == 143


def test_inputs_are_moved_to_the_device_of_the_model():
    """The device without memory has the place of a GPU: torch refuses to mix it with the CPU too."""
    from memledger_client import _model_memory as memory

    inputs = memory.moved({"a": torch.ones(2), "b": (torch.ones(1), [torch.ones(1)]), "c": 3}, "meta")
    assert {each.device.type for each in memory.tensors_in(inputs)} == {"meta"} and inputs["c"] == 3


def test_bytes_of_real_modules_are_exact():
    from memledger_client import _model_memory as memory

    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.BatchNorm1d(20), torch.nn.ReLU(), torch.nn.Linear(20, 5))
    optimizer = torch.optim.Adam(model.parameters())
    parameters = 4 * (10 * 20 + 20 + 20 + 20 + 20 * 5 + 5)
    found = memory.of_model(model, optimizer)
    assert (found.parameters, found.gradients, found.optimizer) == (parameters, parameters, None)
    assert found.buffers == 4 * 20 * 2 + 8  # mean and variance, and a counter of 8 bytes
    assert found.optimizer_estimate == 2 * parameters
    model(torch.zeros(4, 10)).sum().backward()
    optimizer.step()
    steps = 4 * len(list(model.parameters()))  # a counter of 4 bytes for each parameter
    assert memory.of_model(model, optimizer).optimizer == 2 * parameters + steps


def test_activations_of_a_real_module_are_exact():
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 5))
    # the inputs, and what is kept for the backward pass: the result of ReLU, which is also the input of the second layer
    memory = training_memory(model, lambda size: torch.zeros(size, 10))
    fixed = _model_memory.of_model(model).fixed
    assert (memory.per_sample, memory.fixed, memory.optimizer_step) == ((10 + 20) * 4, fixed, fixed)
    assert "estimated on the CPU" in memory.source and memory.at(8) == fixed + 8 * 30 * 4


def test_estimate_on_the_cpu_is_that_of_a_training():
    """In train mode, with the loss, in the precision that is asked for."""
    layers = [torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 64)]
    model = torch.nn.Sequential(*layers).eval()

    def each(**more):
        return training_memory(model, lambda size: torch.zeros(size, 64), **more).per_sample

    plain = each()
    with_loss = each(loss=lambda outputs: torch.nn.functional.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.long)))
    assert plain == 64 * 4 + 64 + 64 * 4 or plain == 64 * 4 * 3  # dropout keeps its mask, and the second layer its input
    assert with_loss >= plain + 64 * 4  # the probabilities
    assert each(mixed_precision=True) < plain and not model.training
    with pytest.raises(ValueError, match="mixed_precision is 'int3'"):
        each(mixed_precision="int3")


def test_optimizer_that_measures_changes_no_parameter():
    """On a GPU its steps are real: their gradients are 0, and so is the learning rate."""
    for make in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        own = make([{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[1].parameters()}], lr=0.1)
        before = [parameter.clone() for parameter in model.parameters()]
        optimizer = _training_memory._without_effect(model, own)
        assert type(optimizer) is make and optimizer is not own
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            for parameter in model.parameters():
                parameter.grad.zero_()
            optimizer.step()
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before)), make
        assert own.param_groups[0]["lr"] == 0.1 and all(float(state["step"]) == 0 for state in own.state.values())
    assert type(_training_memory._without_effect(model, None)) is torch.optim.AdamW


def test_inputs_are_those_that_the_model_was_called_with():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)

        def forward(self, series, *, lengths, scale):
            return self.layer(series).sum(1) * scale / lengths[:, None]

    model = Model()
    with pytest.raises(ValueError, match="give sample="):
        recommend_batch_size(model, 12)
    copied = copy.deepcopy(model)
    batch = torch.arange(5 * 2 * 6.0).reshape(5, 2, 6)
    model(batch, lengths=torch.full((5,), 2), scale=0.5)
    assert not model._forward_pre_hooks
    copied(batch, lengths=torch.full((5,), 2), scale=0.5)
    assert not copied._forward_pre_hooks
    inputs = _inputs.sample_of(model)[0](7)
    assert inputs.arguments[0].shape == (7, 2, 6) and torch.equal(inputs.arguments[0][:2], batch[:2])
    assert inputs.named["lengths"].tolist() == [2] * 7 and inputs.named["scale"] == 0.5
    with pytest.warns(RuntimeWarning, match="with inputs like those of an earlier batch"):
        assert recommend_batch_size(model, 12)["maximum"] > 0
    assert auto_select_batch_size(model, "cpu", 1) > 0
    model.example_input_array = torch.zeros(1, 4)
    assert "earlier batch" in _inputs.sample_of(model)[1]


def test_model_that_waits_for_its_next_batch_works_as_before():
    model = torch.nn.Linear(6, 3)
    assert recommend_batch_size(model, 12)["maximum"] > 0  # with inputs that are assumed
    assert len(model._forward_pre_hooks) == 1 and pickle.loads(pickle.dumps(model))(torch.ones(2, 6)).shape == (2, 3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2, 6)).shape == (2, 3)


def test_inputs_that_a_model_has_with_it():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=64, vocab_size=40000)
    sample, words = _inputs.sample_of(transformers.GPT2LMHeadModel(config))
    inputs = sample(3)
    assert inputs["input_ids"].shape == inputs["labels"].shape == (3, 64) and "texts of 64 tokens" in words
    model = torch.nn.Linear(4, 4)
    model.example_input_array = torch.zeros(2, 4)
    assert _inputs.sample_of(model)[0](5).arguments[0].shape == (5, 4)


class Gpu:
    """The counters of a GPU's allocator, for steps that run on the CPU: they say nothing of its memory."""

    def __init__(self, monkeypatch):
        self.peak = 100 << 20
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (8 << 30, 8 << 30))
        monkeypatch.setattr(_training_memory.peaks, "enter", lambda: None)
        monkeypatch.setattr(_training_memory.peaks, "leave", self.leave)

    def leave(self, _interval):
        self.peak += 1 << 20
        return _peaks.Usage([{"i": 0, "alloc_peak": self.peak}], self.peak)


@pytest.fixture
def steps(monkeypatch):
    """Makes steps as on a GPU, of a device that is the CPU with the index of a GPU."""
    Gpu(monkeypatch)

    def make(model, sample, **more):
        return _training_memory.steps_on_gpu(model, torch.device("cpu", 0), sample, **more)

    return make


def test_steps_leave_parameters_gradients_and_optimizers_as_they_are(steps):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 2)).eval()
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()], lr=0.1)
    model[1].register_buffer("expanded", torch.arange(4).expand(3, 4))
    other(model(torch.randn(4, 8))).sum().backward()
    optimizer.step()
    everything = [*model.parameters(), *other.parameters(), *model.buffers()]
    gradients = [each.grad for each in everything]
    before = [each.clone() for each in everything], [None if each is None else each.clone() for each in gradients]
    with pytest.raises(ZeroDivisionError):
        with steps(model, lambda size: torch.randn(size, 8), optimizer=optimizer) as found:
            assert model.training and fit_sizes(found) > 0
            raise ZeroDivisionError
    assert not model.training
    assert all(torch.equal(*pair) for pair in zip(everything, before[0]))
    assert all(now.grad is then for now, then in zip(everything, gradients))
    assert all(then is None or torch.equal(now.grad, then) for now, then in zip(everything, before[1]))
    assert all(float(state["step"]) == 1 for state in optimizer.state.values()) and len(optimizer.state) == 8


def fit_sizes(found):
    return _training_memory.fit(found, gradients=0, available=1 << 40).per_sample


def test_steps_of_one_sample_where_batch_norm_needs_two(steps):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    sizes = []

    def sample(size):
        sizes.append(size)
        return torch.randn(size, 8)

    with steps(model, sample) as found:
        found.measure(1)
    assert sizes == [1, 2, 2]


def test_steps_hold_nothing_at_their_end(steps):
    outputs = []
    model = torch.nn.Linear(8, 2)
    model.register_forward_hook(lambda _module, _inputs, output: outputs.append(weakref.ref(output)))
    with steps(model, lambda size: torch.randn(size, 8)) as found:
        found.measure(4)
    assert [each() for each in outputs] == [None] * len(outputs) and found._optimizer is None


def test_estimates_hold_nothing_at_their_end():
    outputs = []
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid())
    model.register_forward_hook(lambda _module, _inputs, output: outputs.append(weakref.ref(output)))
    training_memory(model, lambda size: torch.randn(size, 8))
    assert len(outputs) == 2 and [each() for each in outputs] == [None, None]


def test_optimizer_or_loss_that_fails_is_an_error_that_says_why(steps):
    @dataclasses.dataclass
    class Outputs:
        logits: torch.Tensor

    class Model(torch.nn.Embedding):
        def forward(self, tokens):
            return Outputs(super().forward(tokens))

    def sample(size):
        return torch.zeros(size, 4, dtype=torch.long)

    assert training_memory(Model(10, 4), sample).per_sample > 0
    with pytest.raises(ValueError, match="training step for the measurement failed: KeyError: 'no_loss'"):
        training_memory(Model(10, 4), sample, loss=lambda outputs: outputs.logits if False else {}["no_loss"])
    with pytest.raises(ValueError, match="sparse"), analyze._explained(2), steps(Model(10, 4, sparse=True), sample) as found:
        found.measure(2)


def test_models_whose_steps_would_not_be_without_effect_are_not_measured():
    linear = torch.nn.Linear(4, 4)
    linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    lazy = torch.nn.LazyLinear(4)
    spread = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, device="meta"))
    for model, says in ((linear, "train during the backward pass"), (lazy, "without a size"), (spread, "several devices")):
        with pytest.raises(ValueError, match=says):
            recommend_batch_size(model, 12, sample=lambda size: torch.zeros(size, 4))


def test_model_that_is_spread_over_processes_is_not_measured():
    class FullyShardedDataParallel(torch.nn.Linear):
        pass

    with pytest.raises(ValueError, match="sharded"):
        recommend_batch_size(torch.nn.Sequential(FullyShardedDataParallel(4, 4)), 12, sample=lambda size: torch.zeros(size, 4))


def test_measuring_leaves_a_training_as_it_is():
    """BatchNorm, dropout, gradients and an optimizer in the middle of a training, measured under no_grad."""
    import random

    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.BatchNorm1d(20), torch.nn.Dropout(), torch.nn.Linear(20, 1))
    model(torch.randn(4, 10)).sum().backward()

    def sample(size):
        random.random()
        return torch.randn(size, 10)

    def state():
        values = [value.clone() for value in model.state_dict().values()]
        gradients = [parameter.grad for parameter in model.parameters()]
        return values, gradients, torch.get_rng_state(), random.getstate(), [module.training for module in model.modules()]

    model[2].eval()
    before, copies = state(), [parameter.grad.clone() for parameter in model.parameters()]
    with torch.no_grad():
        assert training_memory(model, sample).per_sample > 0
    auto_select_batch_size(model, "cpu", 1, sample)
    after = state()
    assert all(torch.equal(*pair) for pair in zip(before[0], after[0]))
    assert all(first is second for first, second in zip(before[1], after[1]))
    assert all(torch.equal(parameter.grad, copy) for parameter, copy in zip(model.parameters(), copies))
    assert torch.equal(before[2], after[2]) and before[3:] == after[3:]


def test_model_comes_back_to_its_device_after_an_error():
    """The device without memory, meta, has the place of a GPU."""
    from memledger_client import _model_memory as memory

    model = torch.nn.BatchNorm1d(3)
    model.running_mean += 7
    with pytest.raises(ZeroDivisionError):
        with memory.unchanged(model, "meta"):
            buffer = model.running_mean
            model._buffers["running_mean"] = torch.zeros(3, device="meta")
            raise ZeroDivisionError
    assert model.running_mean is buffer and buffer.tolist() == [7, 7, 7]


def test_frozen_model_has_no_recommendation():
    model = torch.nn.Linear(10, 10).requires_grad_(False)
    with pytest.raises(ValueError, match="no gradient"):
        recommend_batch_size(model, 12, sample=lambda size: torch.zeros(size, 10))


def test_recommendation_is_computed_from_measured_activations():
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 1))
    found = recommend_batch_size(model, gpu_memory_gb=0.1, sample=lambda size: torch.zeros(size, 1000))
    assert found["recommended"] == found["maximum"] // 2 and found["safe"] == found["maximum"] // 4
    budget = 0.1 * 2**30 * 0.7 - 16 * (1000 * 1000 + 1000 + 1000 + 1)
    assert found["maximum"] <= budget / 8000 < 2 * found["maximum"]
    assert auto_select_batch_size(model, "cpu", 1, lambda size: torch.zeros(size, 1000)) >= 1


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_callback_counts_the_steps_of_a_real_trainer(receiver, run, tmp_path, package):
    pytest.importorskip(package)
    programs = {
        "transformers": """
import torch, transformers
from memledger_client.huggingface import MemledgerCallback
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).pow(2).mean()}
data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 12
arguments = transformers.TrainingArguments("out", max_steps=3, per_device_train_batch_size=2,
    gradient_accumulation_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[MemledgerCallback(report=True)]).train()
""",
        "lightning": """
import torch, lightning
from memledger_client.lightning import MemledgerCallback
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, number):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(max_steps=3, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, callbacks=[MemledgerCallback(batch_size=2, report=True)])
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(24, 2), batch_size=2))
""",
    }
    program = run(programs[package], path=(ROOT,))
    code, out, err = program.end()
    assert code == 0, err
    assert out.count("Batch of 2, in the precision of the program:") == 1 and "the training uses no GPU" in out
    assert receiver.wait("step", lambda message: message["n"] == 3)["samples"] == 12
    settings = receiver.wait("settings")["kv"]
    wanted = {
        "transformers": {"per_device_train_batch_size": "2", "gradient_accumulation_steps": "2", "dataloader_num_workers": "0"},
        "lightning": {"batch_size": 2, "accumulate_grad_batches": 2, "num_workers": 0, "precision": "32-true"},
    }[package]
    assert {name: settings.get(name) for name in wanted} == wanted, settings


def test_compiled_code_keeps_one_graph():
    @memledger_client.track("model", "decorated")
    def decorated(x):
        return x + 1

    def forward(x):
        with memledger_client.track("model", "forward"):
            y = decorated(x) * 2
        memledger_client.step(batch_size=2)
        return y

    compiled = torch.compile(forward, backend="eager", fullgraph=True)  # an error where the graph breaks
    assert compiled(torch.ones(2)).tolist() == [4, 4]


def test_functions_that_are_wrapped_exist():
    from memledger_client import _peaks

    names = [*_peaks.READERS, *_peaks.PEAK_RESETS, *_peaks.TOTAL_RESETS]
    names += ["_cuda_customAllocator", "_cuda_hasPrimaryContext", "_cuda_isHistoryEnabled"]
    assert [name for name in names if not hasattr(torch._C, name)] == []
    # and the program's own functions go by way of them
    for function, name in (
        (torch.cuda.memory.memory_stats_as_nested_dict, "_cuda_memoryStats"),
        (torch.cuda.memory.reset_peak_memory_stats, "_cuda_resetPeakMemoryStats"),
        (torch.cuda.memory.CUDAPluggableAllocator.__init__, "_cuda_customAllocator"),
    ):
        assert name in function.__code__.co_names


def test_analyze_measures_the_model_of_a_module(run, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nlayers = [torch.nn.Linear(1000, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 1000)]\n"
        "def make():\n    return torch.nn.Sequential(*layers), lambda size: torch.zeros(size, 1000)\n"
        "def alone():\n    layers[0].example_input_array = torch.zeros(1, 1000)\n    return layers[0]\n"
        "def frozen():\n    return layers[0].requires_grad_(False), lambda size: torch.zeros(size, 1000)\n"
    )

    def analyze(target, *more):
        arguments = ("-m", "memledger_client.analyze", target, *more, "--auto-batch-size", "--batch-size")
        return run("8", path=(ROOT,), arguments=arguments).end()

    code, out, err = analyze("mine:make")
    assert code == 0, err
    assert "Batch of 8, in the precision of the program:" in out and "Largest batch size on cpu (estimated)" in out
    code, out, err = analyze("mine:make", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and found["gpus"] == [] and found["batch_size"] == 8 and found["auto_batch_size"] > 1
    parameters = 2 * 4 * (1000 * 1000 + 1000)
    assert found["parameters_bytes"] == found["gradients_bytes"] == parameters
    assert found["highest_bytes"] == 4 * parameters + 8 * 8000 and "estimated on the CPU" in found["source"]
    code, out, err = analyze("mine:alone")
    assert code == 0 and "with the model's example_input_array" in out, err
    code, _, err = analyze("mine:frozen")
    assert code == 1 and err.startswith("mine:frozen: its outputs have no gradient"), err


#: The report of a training script, by the old names.
REPORT = """
import torch
from memledger_client.compat import auto_select_batch_size, get_gpu_info, print_gpu_info, print_memory_analysis, recommend_batch_size

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv1d(8, 16, 3)
        self.lstm = torch.nn.LSTM(16, 32, batch_first=True)
        self.head = torch.nn.Linear(32, 4)
    def forward(self, series):
        return self.head(self.lstm(self.convolution(series).transpose(1, 2))[0][:, -1])

print_gpu_info()
print(len(get_gpu_info()))
model = Model()
print_memory_analysis(model, 32)                      # before any batch: with inputs that are assumed
for _ in range(2):
    model(torch.randn(32, 8, 100)).sum().backward()
print_memory_analysis(model, 32, 0, mixed_precision=False)
print(sorted(recommend_batch_size(model, 12)), recommend_batch_size(model, 12, 0.7)["safe"] > 0)
print(auto_select_batch_size(model, torch.device("cpu"), 16) >= 16)
"""


def test_old_report_works_after_its_import_line(run):
    code, out, _ = run(REPORT, path=(ROOT,)).end()
    lines = out.splitlines()
    assert code == 0 and lines[:2] == ["GPUs: 0", "0"]
    first, second = (index for index, line in enumerate(lines) if line == "Model:")
    assert "inputs that are assumed, 8 x 128 numbers a sample" in "\n".join(lines[first:second])
    names = [line.split()[0] for line in lines[second + 1 :] if line.startswith("  ")]
    assert names == ["parameters", "buffers", "gradients", "optimizer", "together", "input", "activations", "highest"]
    assert lines[-2:] == ["['maximum', 'recommended', 'safe'] True", "True"]


#: What goes before an example of docs/compat.md, so that it sends nothing, and what shows after it that the values arrived.
GRAPHS = {
    "clearml": (
        """
from clearml import Task
Task.set_offline(True)
task = Task.init("memory", "test", auto_connect_frameworks=False, auto_resource_monitoring=False)
Logger = type(task.get_logger())
keep, Logger.report_scalar = Logger.report_scalar, lambda *given: (keep(*given), print(given[1:3]))
""",
        "",
        ["('memory/model', 'cpu_ram_used_mb')", "('memory/model', 'gpu_ram_peak_mb')", "('memory/process', 'cpu_ram_used_mb')"],
    ),
    "tensorboard": (
        "",
        """
writer.close()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("runs/memory").Reload()
print(events.Tags()["scalars"], [each.step for each in events.Scalars("memory/model/cpu_ram_used_mb")])
""",
        ["memory/model/gpu_ram_peak_mb", "memory/process/cpu_ram_used_mb", "[2]"],
    ),
    "wandb": (
        """
import os
os.environ["WANDB_MODE"] = "offline"
""",
        """
run.finish()  # prints the newest value of each
""",
        ["memory/model/gpu_ram_peak_mb", "memory/process/cpu_ram_used_mb"],
    ),
    "mlflow": (
        """
import mlflow
mlflow.set_tracking_uri("file:./mlruns")
mlflow.start_run()
""",
        """
print(sorted(mlflow.get_run(mlflow.active_run().info.run_id).data.metrics))
""",
        ["memory/model/cpu_ram_used_mb", "memory/model/gpu_ram_peak_mb", "memory/process/cpu_ram_used_mb"],
    ),
}


@pytest.mark.parametrize("package", GRAPHS)
def test_example_of_a_graph_gets_what_is_tracked_and_sampled(run, package):
    pytest.importorskip(package)
    blocks = (ROOT.parent / "docs/compat.md").read_text().split("```python\n")[1:]
    (example,) = (block.split("```")[0] for block in blocks if f"to_{package}" in block)
    before, after, wanted = GRAPHS[package]
    program = run(
        f"""
{before}
{example}
import threading, memledger_client
sampled = threading.Event()
memledger_client.on_record(lambda record: record["component"] == "process" and sampled.set())
memledger_client.step(2)
with memledger_client.track("model", "forward"):
    pass
sampled.wait(20)
{after}
""",
        path=(ROOT,),
        environment={"CLEARML_CACHE_DIR": "clearml", "HOME": ".", "MLFLOW_ALLOW_FILE_STORE": "true"},
    )
    code, out, err = program.end()
    assert code == 0, err
    assert [words for words in wanted if words not in out + err] == [], out + err


#: Models as the old call gets them, and what is said of the inputs.
ASSUMED = {
    "linear": ("torch.nn.Sequential(torch.nn.Linear(20, 5))", "20 numbers"),
    "images": ("torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1))", "3 x 224 x 224 numbers"),
    "small images": ("torch.nn.Sequential(torch.nn.Conv2d(1, 4, 5), torch.nn.Flatten(), torch.nn.Linear(4 * 24 * 24, 10))", "1 x 28 x 28 numbers"),
    "series": ("torch.nn.LSTM(6, 4, batch_first=True)", "128 x 6 numbers"),
    "tokens": ("torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 2))", "128 tokens"),
    "volumes": ("torch.nn.Conv3d(1, 2, 3)", "1 x 64 x 64 x 64 numbers"),
    "half": ("torch.nn.Linear(20, 5).bfloat16()", "20 numbers"),
}


@pytest.mark.parametrize("name", ASSUMED)
def test_old_call_answers_with_inputs_that_are_assumed(run, name):
    model, words = ASSUMED[name]
    program = run(f"import torch\nfrom memledger_client.compat import recommend_batch_size\nprint(recommend_batch_size({model}, 12))", path=(ROOT,))
    code, out, err = program.end()
    assert code == 0, err
    assert sorted(eval(out)) == ["maximum", "recommended", "safe"] and eval(out)["safe"] > 0
    assert f"with inputs that are assumed, {words} a sample: give sample=" in err.replace("texts of 128 tokens", words)


def test_models_of_hugging_face_have_their_inputs_from_their_configuration():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=32, patch_size=8)
    found = training_memory(transformers.ViTForImageClassification(config))
    assert "assumed, 3 x 32 x 32 numbers a sample" in found.source


def test_inputs_that_cannot_be_inferred_are_an_error_and_those_of_a_batch_precede_assumed_ones():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, one, other):
            return self.layer(one + other)

    with pytest.raises(ValueError, match="give sample="):
        recommend_batch_size(Two(), 12)
    model = torch.nn.LSTM(6, 4, batch_first=True)
    assert "assumed" in training_memory(model).source
    model(torch.zeros(3, 10, 6))
    after = training_memory(model)
    assert "inputs like those of an earlier batch" in after.source and "assumed" not in after.source


def test_report_says_what_mixed_precision_saves(capsys):
    from memledger_client.compat import print_memory_analysis

    layers = [torch.nn.Linear(100, 100), torch.nn.Sigmoid()]
    model = torch.nn.Sequential(*(layers * 6))
    print_memory_analysis(model, 4096, mixed_precision=True, sample=lambda size: torch.zeros(size, 100))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  saved"))
    assert float(line.split()[1]) > 0 and "by mixed precision" in line
    print_memory_analysis(model, 4096, sample=lambda size: torch.zeros(size, 100))
    assert "saved" not in capsys.readouterr().out
