"""Other frameworks' trainers: one contestant of ``benchmarks.compare`` each.

    torchrun benchmarks/peers.py KIND WORKLOAD SOCKET     # KIND: accelerate, lightning, transformers; or accelerate-bf16, ...

In the number format that is their default, fp32, or with their own switch for bf16 (autocast); without ``torch.compile``. What the
framework leaves to its user is done as well as torch's documentation says: fused AdamW, torchvision's v2 transforms on uint8
tensors (the faster of its two ways, see ``benchmarks.data_path``), and, but for the HF Trainer, which has no setting for it,
gradients as views of DDP's buckets. Loader processes would take the cores that train, and make all of them slower where there are
as many ranks as cores.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started as a script

import torch
from torch import nn

from benchmarks import workloads
from benchmarks.gate import Gate
from benchmarks.workloads import ADAMW, CLIP, GLOBAL_BATCH
from dsframe.data._torchvision import torchvision

FOREVER = 1_000_000


def accelerate(name, gate, *, bf16):
    """https://huggingface.co/docs/accelerate/basic_tutorials/migration"""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if bf16 else None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    model = workloads.model(name)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    # Accelerate deals out whole batches to the ranks in turn.
    batches = workloads.loader(name, None, accelerator.num_processes, fast=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = gate.loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def lightning(name, gate, *, bf16):
    """https://lightning.ai/docs/pytorch/stable/common/trainer.html#barebones: without all that may cost speed."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = workloads.model(name)

        def training_step(self, batch, index):
            inputs, targets = batch
            return gate.loss(self.model(inputs), targets)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), fused=True, **ADAMW)

        def on_before_optimizer_step(self, optimizer):
            if bf16:  # Lightning's own clipping refuses fused optimizers in mixed precision
                nn.utils.clip_grad_norm_(self.parameters(), CLIP)

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
        precision="bf16-mixed" if bf16 else "32-true",
        max_steps=FOREVER,
        barebones=True,
        gradient_clip_val=None if bf16 else CLIP,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), workloads.loader(name, trainer.global_rank, 2, fast=True))


def transformers(name, gate, *, bf16):
    """https://huggingface.co/docs/transformers/main_classes/trainer"""
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(self, model, inputs, *_, **__):
            return gate.loss(model(inputs["inputs"]), inputs["targets"])

        def _get_train_sampler(self, *_):
            return workloads.Order(len(self.train_dataset), name, None, 2)

    def collate(items):
        inputs, targets = torch.utils.data.default_collate(items)
        return {"inputs": inputs, "targets": targets}

    arguments = TrainingArguments(
        output_dir=str(gate.folder / "output"),
        use_cpu=True,
        bf16=bf16,
        ddp_backend="gloo",
        max_steps=FOREVER,
        per_device_train_batch_size=GLOBAL_BATCH[name] // 2,
        learning_rate=ADAMW["lr"],
        weight_decay=0.0,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )
    data = workloads.dataset(name, fast=True)
    Own(workloads.model(name), arguments, collate, data).train()


def main(arguments):
    kind, name, path = arguments
    torchvision()  # the peers import it, and fail where its compiled part belongs to another build of torch
    framework, _, short = kind.partition("-")
    train = {"accelerate": accelerate, "lightning": lightning, "transformers": transformers}[framework]
    train(name, Gate(path, kind), bf16=short == "bf16")


if __name__ == "__main__":
    main(sys.argv[1:])
