"""The client beside the real torch, on the CPU: `make test-torch`. Not part of `make test`, because torch is 5 GB.

Here are the parts that the stand-in cannot prove: bytes of real modules, DataLoader workers, torchrun, and the import hook.
"""

import os
import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT, eventually

torch = pytest.importorskip("torch")
import memledger  # noqa: E402 # where torch is
assert not hasattr(torch, "IS_STANDIN"), "these tests are for the real torch"

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "deploy/examples"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_dataloader_training_reports_while_its_workers_do_not(receiver, run, tmp_path, method):
    script = tmp_path / "start.py"
    script.write_text(
        f"""
import sys, torch.multiprocessing
sys.path.insert(0, {str(EXAMPLES)!r})
import memledger, train_reported
load = train_reported.Images.__getitem__
train_reported.Images.__getitem__ = memledger.track("data", "item")(load)  # called in the workers
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
import memledger, torch, torch.distributed as distributed
distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(5):
    model(torch.ones(2, 4)).sum().backward()
    memledger.step(batch_size=2)
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
    program = run(f"import memledger, torch\nmemledger.start()\nmemledger.step()\nraise torch.OutOfMemoryError({text!r})\n", path=(ROOT,))
    code, _, err = program.end()
    assert code == 1 and err.rstrip().endswith(f"torch.OutOfMemoryError: {text}")
    message = receiver.wait("oom")
    assert message["uncaught"] and message["text"] == text


def test_cleanup_without_a_gpu_gives_nothing_back_and_initialises_nothing(receiver, run):
    program = run(
        """
import memledger, torch
memledger.start()
memledger.cleanup_on("step", every=1)
for _ in range(5):
    memledger.step()
print(memledger.cleanup(), torch.cuda.is_initialized(), flush=True)
""",
        path=(ROOT,),
    )
    assert program.end() == (0, "None False\n", "")
    assert receiver.wait("step", lambda message: message["n"] == 5)


def test_shutdown_frees_and_ends_by_the_signal(receiver, run):
    program = run(
        """
import memledger, signal, torch
memledger.start()
memledger.install_shutdown()
model = torch.nn.Linear(4, 4)
print("ready", flush=True)
while True:
    model(torch.ones(2, 4)).sum().backward()
    memledger.step()
""",
        path=(ROOT,),
    )
    assert program.line() == "ready"
    receiver.wait("step")
    program.process.terminate()
    assert program.end()[0] == 143


def test_inputs_are_moved_to_the_device_of_the_model():
    """The device without memory has the place of a GPU: torch refuses to mix it with the CPU too."""
    from memledger import _model_memory as memory

    inputs = memory.moved({"a": torch.ones(2), "b": (torch.ones(1), [torch.ones(1)]), "c": 3}, "meta")
    assert {each.device.type for each in memory.tensors_in(inputs)} == {"meta"} and inputs["c"] == 3
    memory.activation_bytes(torch.nn.Linear(4, 4, device="meta"), torch.ones(2, 4))


def test_bytes_of_real_modules_are_exact():
    from memledger import _model_memory as memory

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
    from memledger import _model_memory as memory

    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 5))
    # kept for the backward pass: the result of ReLU, which is also the input of the second layer
    assert memory.activation_bytes(model, torch.zeros(8, 10)) == 8 * 20 * 4
    assert memory.measure_activations(model, lambda size: torch.zeros(size, 10), (2, 4)) == (80, 0)


def test_measuring_leaves_a_training_as_it_is():
    """BatchNorm, dropout, gradients and an optimizer in the middle of a training, measured under no_grad."""
    import random

    from memledger import _model_memory as memory
    from memledger.compat import auto_select_batch_size

    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.BatchNorm1d(20), torch.nn.Dropout(), torch.nn.Linear(20, 1))
    model(torch.randn(4, 10)).sum().backward()

    def sample(size):
        random.random()
        return torch.randn(size, 10)

    def state():
        values = [value.clone() for value in model.state_dict().values()]
        gradients = [parameter.grad for parameter in model.parameters()]
        return values, gradients, torch.get_rng_state(), random.getstate(), model.training

    before, copies = state(), [parameter.grad.clone() for parameter in model.parameters()]
    with torch.no_grad():
        each, _ = memory.measure_activations(model, sample, (2, 4))
    assert each > 0
    auto_select_batch_size(model, "cpu", 1, sample)
    after = state()
    assert all(torch.equal(*pair) for pair in zip(before[0], after[0]))
    assert all(first is second for first, second in zip(before[1], after[1]))
    assert all(torch.equal(parameter.grad, copy) for parameter, copy in zip(model.parameters(), copies))
    assert torch.equal(before[2], after[2]) and before[3:] == after[3:]


def test_model_comes_back_to_its_device_after_an_error():
    """The device without memory, meta, has the place of a GPU."""
    from memledger import _model_memory as memory

    model = torch.nn.BatchNorm1d(3)
    model.running_mean += 7
    with pytest.raises(ZeroDivisionError):
        with memory.unchanged(model, "meta"):
            buffer = model.running_mean
            model._buffers["running_mean"] = torch.zeros(3, device="meta")
            raise ZeroDivisionError
    assert model.running_mean is buffer and buffer.tolist() == [7, 7, 7]


def test_frozen_model_has_no_recommendation():
    from memledger.compat import recommend_batch_size

    model = torch.nn.Linear(10, 10).requires_grad_(False)
    with pytest.raises(ValueError, match="keeps no activations"):
        recommend_batch_size(model, 12, sample=lambda size: torch.zeros(size, 10))


def test_recommendation_is_computed_from_measured_activations():
    from memledger.compat import auto_select_batch_size, print_memory_analysis, recommend_batch_size

    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 1))
    found = recommend_batch_size(model, gpu_memory_gb=0.1, sample=lambda size: torch.zeros(size, 1000))
    assert found["recommended"] == found["maximum"] // 2 and found["safe"] == found["maximum"] // 4
    budget = 0.1 * 2**30 * 0.7 - 16 * (1000 * 1000 + 1000 + 1000 + 1)
    assert found["maximum"] <= budget / 4000 < 2 * found["maximum"]
    print_memory_analysis(model, 8)  # unknown activations are no error
    assert auto_select_batch_size(model, "cpu", 1, lambda size: torch.zeros(size, 1000)) >= 1


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_callback_counts_the_steps_of_a_real_trainer(receiver, run, tmp_path, package):
    pytest.importorskip(package)
    programs = {
        "transformers": """
import torch, transformers
from memledger.huggingface import MemledgerCallback
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).pow(2).mean()}
data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 12
arguments = transformers.TrainingArguments("out", max_steps=3, per_device_train_batch_size=2,
    gradient_accumulation_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[MemledgerCallback()]).train()
""",
        "lightning": """
import torch, lightning
from memledger.lightning import MemledgerCallback
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, number):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(max_steps=3, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, callbacks=[MemledgerCallback(batch_size=2)])
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(24, 2), batch_size=2))
""",
    }
    program = run(programs[package], path=(ROOT,))
    code, _, err = program.end()
    assert code == 0, err
    assert receiver.wait("step", lambda message: message["n"] == 3)["samples"] == 12
    settings = receiver.wait("settings")["kv"]
    wanted = {
        "transformers": {"per_device_train_batch_size": "2", "gradient_accumulation_steps": "2", "dataloader_num_workers": "0"},
        "lightning": {"batch_size": 2, "accumulate_grad_batches": 2, "num_workers": 0, "precision": "32-true"},
    }[package]
    assert {name: settings.get(name) for name in wanted} == wanted, settings


def test_compiled_code_keeps_one_graph():
    @memledger.track("model", "decorated")
    def decorated(x):
        return x + 1

    def forward(x):
        with memledger.track("model", "forward"):
            y = decorated(x) * 2
        memledger.step(batch_size=2)
        return y

    compiled = torch.compile(forward, backend="eager", fullgraph=True)  # an error where the graph breaks
    assert compiled(torch.ones(2)).tolist() == [4, 4]


def test_functions_that_are_wrapped_exist():
    from memledger import _peaks

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
        "def frozen():\n    return layers[0].requires_grad_(False), lambda size: torch.zeros(size, 1000)\n"
    )

    def analyze(target):
        arguments = ("-m", "memledger.analyze", target, "--auto-batch-size", "--batch-size")
        return run("8", path=(ROOT,), arguments=arguments).end()

    code, out, err = analyze("mine:make")
    assert code == 0, err
    assert "Memory of the model with batch size 8" in out and "Largest batch size on cpu (measured)" in out
    code, _, err = analyze("mine:frozen")
    assert code == 1 and err.startswith("mine:frozen: the model keeps no activations"), err
